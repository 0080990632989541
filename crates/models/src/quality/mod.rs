//! Judges models: perplexity, KL divergence and error per tensor.
