//! Lists a model file's metadata and tensors: `cargo run -p quadriga-gguf --example list FILE`.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let path = std::env::args_os().nth(1).ok_or("usage: list FILE")?;
    let file = quadriga_gguf::File::open(path)?;
    for (key, value) in file.metadata() {
        println!("{key} = {value}");
    }
    for tensor in file.tensors() {
        println!("{:<40} {:<6} {:?}", tensor.name(), tensor.dtype(), tensor.shape());
    }
    Ok(())
}
