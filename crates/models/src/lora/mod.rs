//! Low-rank adapters: loaded at run time, or merged into a file.
