//! Downloads models from a hub into a content-addressed cache.
