//! Splits GGUF files into shards and merges them.
