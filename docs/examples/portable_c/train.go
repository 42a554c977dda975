// CGO_CFLAGS=-ISTEP_FOLDER CGO_LDFLAGS="STEP_FOLDER/libstep.so" go run train.go EPOCHS x.bin label.bin
package main

/*
#include <stdio.h>
#include <stdlib.h>
#include "step.h"

static int written(void *file, const void *bytes, size_t count) {
	return fwrite(bytes, 1, count, file) != count;
}

static int save(const void *state) {
	FILE *file = fopen("state.safetensors", "wb");
	return !file || step_save(state, written, file) || fclose(file);
}
*/
import "C"

import (
	"fmt"
	"os"
	"strconv"
)

// column is a file in memory of C, which Go neither moves nor frees.
func column(path string) ([]byte, error) {
	return os.ReadFile(path)
}

func main() {
	epochs, _ := strconv.Atoi(os.Args[1])
	x, err := column(os.Args[2])
	label, other := column(os.Args[3])
	if err != nil || other != nil {
		panic("a column is missing")
	}
	data, labels := (*C.float)(C.CBytes(x)), (*C.int64_t)(C.CBytes(label))
	steps := int64(len(label)) / 8 / int64(C.step_rows())
	state, memory := C.malloc(C.size_t(C.step_state_bytes())), C.malloc(C.size_t(C.step_memory_bytes()))
	losses := make([]float64, steps)
	C.step_start(state)
	for epoch := 1; epoch <= epochs; epoch++ {
		wrong := C.step_train(state, memory, data, labels, nil, C.int64_t(steps), nil,
			(*C.double)(&losses[0]))
		if wrong != 0 {
			panic("a label is out of range")
		}
		sum := 0.0
		for _, loss := range losses {
			sum += loss
		}
		fmt.Printf("epoch %d: loss %.6g\n", epoch, sum/float64(steps))
	}
	if C.save(state) != 0 {
		panic("state.safetensors cannot be written")
	}
}
