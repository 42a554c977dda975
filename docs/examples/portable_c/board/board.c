/* Train on a microcontroller without a system: samples.h has the columns x and label, STEPS and EPOCHS.
   The results go to the debugger (semihosting): the losses as text, the state as state.safetensors. */
#include "samples.h"
#include "step.h"

static uint64_t state[STEP_STATE_BYTES / 8], memory[STEP_MEMORY_BYTES / 8];
extern uint32_t data_start[], data_end[], data_values[], bss_start[], bss_end[], stack_end[];

static int call_debugger(int operation, const void *arguments) {
    register int r0 __asm__("r0") = operation;
    register const void *r1 __asm__("r1") = arguments;
    __asm__ volatile("bkpt 0xab" : "+r"(r0) : "r"(r1) : "memory");
    return r0;
}

static void print(double loss) {
    char text[] = "0000000000000000\n";
    uint64_t bits;
    __builtin_memcpy(&bits, &loss, 8);
    for (int k = 15; k >= 0; k--, bits >>= 4) text[k] = "0123456789abcdef"[bits & 15];
    call_debugger(0x04, text);
}

static int written(void *file, const void *bytes, size_t count) {
    uint32_t arguments[] = { *(uint32_t *)file, (uint32_t)bytes, count };
    return call_debugger(0x05, arguments);
}

__attribute__((noinline)) static void train(void) {
    double losses[STEPS];
    step_start(state);
    for (int epoch = 0; epoch < EPOCHS; epoch++) {
        if (step_train(state, memory, x, label, NULL, STEPS, NULL, losses)) return;
        for (int k = 0; k < STEPS; k++) print(losses[k]);
    }
    uint32_t path[] = { (uint32_t)"state.safetensors", 5, 17 };
    uint32_t file = call_debugger(0x01, path);
    step_save(state, written, &file);
    call_debugger(0x02, &file);
}

void start(void) {
#ifdef __ARM_FP
    *(volatile uint32_t *)0xe000ed88 |= 0xfu << 20; /* switch the floating-point unit on */
    __asm__ volatile("dsb\n isb");
#endif
    for (uint32_t *to = data_start, *from = data_values; to < data_end;) *to++ = *from++;
    for (uint32_t *to = bss_start; to < bss_end;) *to++ = 0;
    train();
    call_debugger(0x18, (void *)0x20026);
    for (;;) {}
}

__attribute__((section(".vectors"), used)) static const void *const vectors[] = { stack_end, start };
