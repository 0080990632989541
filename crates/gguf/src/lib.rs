//! GGUF model files: a checked reader over a file map, and a writer.
