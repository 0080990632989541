#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| quadriga_fuzz::request::lora_adapters(bytes));
