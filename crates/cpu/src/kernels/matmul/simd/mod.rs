//! Small vector functions that the loads of several storages share.

pub(super) mod avx2;
pub(super) mod avx512;
