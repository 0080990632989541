//! Quantizes model files: block formats, mixes of types, and types chosen to fit a size.
