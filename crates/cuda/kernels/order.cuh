// The order of floats as integers, for sorting and for finding maxima.

// Maps a float to an integer of the same order; both zeros map to one key, and all NaNs to another.
__device__ __forceinline__ u32 sortable(float v, int descending) {
    u32 bits = __float_as_uint(v != v ? __uint_as_float(0x7fffffffu) : v + 0.0f);
    bits = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    return descending ? ~bits : bits;
}

// A value and its index as one key: larger for larger values and, of equal values, for smaller indices; never 0.
__device__ __forceinline__ u64 ranked(float v, int index) { return (u64)sortable(v, 0) << 32 | (u32)~index; }
