// c++ train.cpp -I STEP_FOLDER STEP_FOLDER/libstep.so; ./a.out EPOCHS x.bin label.bin
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <vector>
#include "step.h"

template <class T> std::vector<T> column(const char *path) {
    std::ifstream file(path, std::ios::binary);
    std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
    std::vector<T> out(bytes.size() / sizeof(T));
    std::copy(bytes.begin(), bytes.end(), reinterpret_cast<char *>(out.data()));
    return out;
}

int main(int, char **argv) {
    auto x = column<float>(argv[2]);
    auto label = column<int64_t>(argv[3]);
    std::vector<double> state(step_state_bytes() / 8 + 1), memory(step_memory_bytes() / 8 + 1);
    std::vector<double> losses(label.size() / STEP_ROWS);
    step_start(state.data());
    for (int epoch = 1; epoch <= std::atoi(argv[1]); epoch++) {
        if (step_train(state.data(), memory.data(), x.data(), label.data(), nullptr,
                       losses.size(), nullptr, losses.data()))
            return 1;
        double sum = 0;
        for (double loss : losses) sum += loss;
        std::printf("epoch %d: loss %.6g\n", epoch, sum / losses.size());
    }
    std::ofstream file("state.safetensors", std::ios::binary);
    return step_save(state.data(), [](void *out, const void *bytes, size_t count) -> int {
        return !static_cast<std::ofstream *>(out)->write(static_cast<const char *>(bytes), count);
    }, &file);
}
