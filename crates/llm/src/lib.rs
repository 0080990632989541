//! Language models as graphs: tokenizer, chat template, cache, sampling and generation.
