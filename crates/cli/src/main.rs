//! The `quadriga` command.
fn main() {}
