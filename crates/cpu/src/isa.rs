//! Instruction sets: detection, selection, and tokens that prove that the CPU has one.
//!
//! A token such as [`Avx512`] can only be created by detection, and every kernel that needs the instructions takes the
//! token: holding it is the proof that makes calling the kernel sound.

use std::fmt;

/// Proof that the CPU and the system support AVX2, FMA and F16C.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Avx2(());

/// Proof of AVX-VNNI, integer dot products on 256-bit vectors, and of [`Avx2`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AvxVnni(());

/// Proof of AVX-512 F, BW, VL, DQ, VNNI, BF16 and VBMI, of GFNI, and of everything in [`Avx2`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Avx512(());

/// Proof of AMX tiles with int8 and bf16, enabled for this process by the operating system, and of [`Avx512`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Amx(());

/// A family of kernels for one instruction set, with the proof that this CPU has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Isa {
    /// Plain Rust, on any CPU.
    Scalar,
    /// 256-bit vectors.
    Avx2(Avx2),
    /// 256-bit vectors with integer dot products: client CPUs without AVX-512.
    AvxVnni(AvxVnni),
    /// 512-bit vectors with integer and bf16 dot products.
    Avx512(Avx512),
    /// 512-bit vectors and matrix tiles.
    Amx(Amx),
}

/// Why the requested instruction set cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum IsaError {
    /// The CPU lacks it, or the operating system does not enable it.
    #[error("this CPU has no {requested}; it has {has}")]
    Missing {
        /// The requested name.
        requested: &'static str,
        /// The names that this CPU supports, separated by commas.
        has: String,
    },
    /// No instruction set has this name.
    #[error("unknown instruction set {name:?}; the names are scalar, avx2, avxvnni, avx512 and amx")]
    Unknown {
        /// The requested name.
        name: String,
    },
}

impl Isa {
    /// The fastest family that this CPU can run.
    pub fn detect() -> Isa {
        Isa::available().pop().unwrap_or(Isa::Scalar)
    }

    /// Every family that this CPU can run, slowest first.
    pub fn available() -> Vec<Isa> {
        let mut all = vec![Isa::Scalar];
        if let Some(token) = Avx2::detect() {
            all.push(Isa::Avx2(token));
        }
        if let Some(token) = AvxVnni::detect() {
            all.push(Isa::AvxVnni(token));
        }
        if let Some(token) = Avx512::detect() {
            all.push(Isa::Avx512(token));
        }
        if let Some(token) = Amx::detect() {
            all.push(Isa::Amx(token));
        }
        all
    }

    /// The family with this name.
    ///
    /// # Errors
    /// The name is unknown, or the CPU lacks the family.
    pub fn named(name: &str) -> Result<Isa, IsaError> {
        let known = ["scalar", "avx2", "avxvnni", "avx512", "amx"];
        let requested = known
            .into_iter()
            .find(|k| k.eq_ignore_ascii_case(name))
            .ok_or_else(|| IsaError::Unknown { name: name.to_owned() })?;
        let available = Isa::available();
        available.iter().copied().find(|isa| isa.name() == requested).ok_or_else(|| IsaError::Missing {
            requested,
            has: available.iter().map(|isa| isa.name()).collect::<Vec<_>>().join(", "),
        })
    }

    /// The name that [`Isa::named`] takes.
    pub const fn name(self) -> &'static str {
        match self {
            Isa::Scalar => "scalar",
            Isa::Avx2(_) => "avx2",
            Isa::AvxVnni(_) => "avxvnni",
            Isa::Avx512(_) => "avx512",
            Isa::Amx(_) => "amx",
        }
    }

    /// The AVX2 token, if this family includes it.
    pub const fn avx2(self) -> Option<Avx2> {
        match self {
            Isa::Scalar => None,
            Isa::Avx2(_) | Isa::AvxVnni(_) | Isa::Avx512(_) | Isa::Amx(_) => Some(Avx2(())),
        }
    }

    /// The AVX-VNNI token, if this is the AVX-VNNI family. Those with wider vectors have dot products of their own.
    pub const fn avx_vnni(self) -> Option<AvxVnni> {
        match self {
            Isa::AvxVnni(token) => Some(token),
            _ => None,
        }
    }

    /// The AVX-512 token, if this family includes it.
    pub const fn avx512(self) -> Option<Avx512> {
        match self {
            Isa::Scalar | Isa::Avx2(_) | Isa::AvxVnni(_) => None,
            Isa::Avx512(_) | Isa::Amx(_) => Some(Avx512(())),
        }
    }

    /// The AMX token, if this is the AMX family.
    pub const fn amx(self) -> Option<Amx> {
        match self {
            Isa::Amx(token) => Some(token),
            _ => None,
        }
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

#[cfg(target_arch = "x86_64")]
impl Avx2 {
    /// The token, if the CPU has the instructions.
    pub fn detect() -> Option<Avx2> {
        let has = is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c");
        has.then_some(Avx2(()))
    }
}

#[cfg(target_arch = "x86_64")]
impl AvxVnni {
    /// The token, if the CPU has the instructions.
    pub fn detect() -> Option<AvxVnni> {
        (Avx2::detect().is_some() && is_x86_feature_detected!("avxvnni")).then_some(AvxVnni(()))
    }
}

#[cfg(target_arch = "x86_64")]
impl Avx512 {
    /// The token, if the CPU has the instructions.
    pub fn detect() -> Option<Avx512> {
        let has = Avx2::detect().is_some()
            && is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vnni")
            && is_x86_feature_detected!("avx512bf16")
            && is_x86_feature_detected!("avx512vbmi")
            && is_x86_feature_detected!("gfni");
        has.then_some(Avx512(()))
    }
}

#[cfg(target_arch = "x86_64")]
impl Amx {
    /// The token, if the CPU has the instructions and the operating system lets this process use the tile registers.
    ///
    /// Linux enables the tile state only when a process requests it; the answer is cached.
    pub fn detect() -> Option<Amx> {
        static GRANTED: std::sync::OnceLock<bool> = std::sync::OnceLock::new();
        let granted = *GRANTED.get_or_init(|| Avx512::detect().is_some() && cpu_has_amx() && request_tiles());
        granted.then_some(Amx(()))
    }
}

#[cfg(target_arch = "x86_64")]
fn cpu_has_amx() -> bool {
    use std::arch::x86_64::{__cpuid, __cpuid_count, _xgetbv};
    const TILE: u32 = 1 << 24;
    const INT8: u32 = 1 << 25;
    const BF16: u32 = 1 << 22;
    const TILE_STATE: u64 = 0b11 << 17;
    const OSXSAVE: u32 = 1 << 27;
    if __cpuid(0).eax < 7 || __cpuid(1).ecx & OSXSAVE == 0 || !is_x86_feature_detected!("xsave") {
        return false;
    }
    let wanted = TILE | INT8 | BF16;
    let features = __cpuid_count(7, 0).edx;
    #[target_feature(enable = "xsave")]
    fn enabled_states() -> u64 {
        // SAFETY: OSXSAVE was checked by the caller of this function, so XCR0 can be read.
        unsafe { _xgetbv(0) }
    }
    // SAFETY: the feature was detected above.
    features & wanted == wanted && unsafe { enabled_states() } & TILE_STATE == TILE_STATE
}

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
fn request_tiles() -> bool {
    const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
    const TILE_DATA: libc::c_long = 18;
    // SAFETY: the call only requests a permission from the kernel; it reads and writes no memory of the process.
    unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, TILE_DATA) == 0 }
}

#[cfg(all(target_arch = "x86_64", not(target_os = "linux")))]
fn request_tiles() -> bool {
    false
}

#[cfg(not(target_arch = "x86_64"))]
impl Avx2 {
    /// No other architecture has these instructions.
    pub fn detect() -> Option<Avx2> {
        None
    }
}

#[cfg(not(target_arch = "x86_64"))]
impl AvxVnni {
    /// No other architecture has these instructions.
    pub fn detect() -> Option<AvxVnni> {
        None
    }
}

#[cfg(not(target_arch = "x86_64"))]
impl Avx512 {
    /// No other architecture has these instructions.
    pub fn detect() -> Option<Avx512> {
        None
    }
}

#[cfg(not(target_arch = "x86_64"))]
impl Amx {
    /// No other architecture has these instructions.
    pub fn detect() -> Option<Amx> {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_available_family_is_found_by_name() {
        let available = Isa::available();
        assert_eq!(available.first(), Some(&Isa::Scalar));
        for isa in available {
            assert_eq!(Isa::named(isa.name()), Ok(isa));
            assert_eq!(Isa::named(&isa.name().to_uppercase()), Ok(isa));
        }
    }

    #[test]
    fn the_error_for_a_missing_or_unknown_family_lists_the_available_ones() {
        let unknown = Isa::named("neon").unwrap_err().to_string();
        assert!(unknown.contains("neon") && unknown.contains("avx512"));
        let missing = IsaError::Missing { requested: "amx", has: "scalar, avx2".into() }.to_string();
        assert_eq!(missing, "this CPU has no amx; it has scalar, avx2");
    }
}
