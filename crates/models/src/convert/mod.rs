//! Converts folders of safetensors to GGUF files.
