// rustc --edition 2021 train.rs -L STEP_FOLDER; LD_LIBRARY_PATH=STEP_FOLDER ./train EPOCHS x.bin label.bin
use std::{env, ffi::c_void, fs, io::Write, ptr::null};

#[link(name = "step")]
extern "C" {
    fn step_rows() -> i64;
    fn step_state_bytes() -> i64;
    fn step_memory_bytes() -> i64;
    fn step_start(state: *mut u64);
    fn step_train(
        state: *mut u64, memory: *mut u64, x: *const f32, label: *const i64,
        rows: *const i64, steps: i64, settings: *const f64, losses: *mut f64,
    ) -> i32;
    fn step_save(
        state: *const u64,
        write: extern "C" fn(*mut c_void, *const u8, usize) -> i32,
        context: *mut c_void,
    ) -> i32;
}

extern "C" fn write(file: *mut c_void, bytes: *const u8, count: usize) -> i32 {
    let file = unsafe { &mut *(file as *mut fs::File) };
    file.write_all(unsafe { std::slice::from_raw_parts(bytes, count) }).is_err() as i32
}

fn main() {
    let arguments: Vec<String> = env::args().collect();
    let bytes = |k: usize| fs::read(&arguments[k]).expect("a column");
    let x: Vec<f32> = bytes(2).chunks(4).map(|c| f32::from_le_bytes(c.try_into().unwrap())).collect();
    let label: Vec<i64> = bytes(3).chunks(8).map(|c| i64::from_le_bytes(c.try_into().unwrap())).collect();
    unsafe {
        let steps = label.len() / step_rows() as usize;
        // u64, so that both are aligned.
        let mut state = vec![0u64; step_state_bytes() as usize / 8 + 1];
        let mut memory = vec![0u64; step_memory_bytes() as usize / 8 + 1];
        let mut losses = vec![0f64; steps];
        step_start(state.as_mut_ptr());
        for epoch in 1..=arguments[1].parse::<usize>().unwrap() {
            let wrong = step_train(
                state.as_mut_ptr(), memory.as_mut_ptr(), x.as_ptr(), label.as_ptr(),
                null(), steps as i64, null(), losses.as_mut_ptr(),
            );
            assert_eq!(wrong, 0, "a label is out of range");
            println!("epoch {}: loss {:.6}", epoch, losses.iter().sum::<f64>() / steps as f64);
        }
        let mut file = fs::File::create("state.safetensors").unwrap();
        assert_eq!(step_save(state.as_ptr(), write, &mut file as *mut fs::File as *mut c_void), 0);
    }
}
