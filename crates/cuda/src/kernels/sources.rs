//! The kernel files' sources.

use sha2::{Digest, Sha256};

/// A kernel file's source: its own text, and the headers beyond those that all files have.
struct KernelSource {
    name: &'static str,
    text: &'static str,
    headers: &'static [(&'static str, &'static str)],
}

/// A kernel file or header: its name and text.
macro_rules! kernel_text {
    ($name:literal) => {
        ($name, include_str!(concat!("../../kernels/", $name)))
    };
}

const ACTIVATIONS: (&str, &str) = kernel_text!("activations.cuh");
const ATTENTION: (&str, &str) = kernel_text!("attention.cuh");
const PAGES: (&str, &str) = kernel_text!("pages.cuh");
const DECODE_TOKEN: (&str, &str) = kernel_text!("decode_token.cuh");
const EXPERT_GEMV: (&str, &str) = kernel_text!("expert_gemv.cuh");
const GATE: (&str, &str) = kernel_text!("gate.cuh");
const MBARRIER: (&str, &str) = kernel_text!("mbarrier.cuh");
const MMA: (&str, &str) = kernel_text!("mma.cuh");
const ORDER: (&str, &str) = kernel_text!("order.cuh");
const QUANTIZE: (&str, &str) = kernel_text!("quantize.cuh");
const ROUTE: (&str, &str) = kernel_text!("route.cuh");
const ROPE: (&str, &str) = kernel_text!("rope.cuh");
const SPLIT: (&str, &str) = kernel_text!("split.cuh");
const WGMMA: (&str, &str) = kernel_text!("wgmma.cuh");
const GEMM_MIXED: (&str, &str) = kernel_text!("gemm_mixed.cuh");

/// Headers of all kernel files.
const HEADERS: [(&str, &str); 5] = [
    kernel_text!("common.cuh"),
    kernel_text!("op_codes.cuh"),
    kernel_text!("code_books.cuh"),
    kernel_text!("formats.cuh"),
    kernel_text!("tensor.cuh"),
];

const fn source(
    (name, text): (&'static str, &'static str),
    headers: &'static [(&'static str, &'static str)],
) -> KernelSource {
    KernelSource { name, text, headers }
}

/// A kernel file.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum KernelFile {
    Elementwise,
    Norm,
    Rope,
    Rows,
    Reduce,
    Matmul,
    Pack,
    Attention,
    AttentionMma,
    AttentionDecode,
    AttentionGrouped,
    AttentionPaged,
    GemvStreamed,
    Gemm,
    GemmWgmma,
    GemmMixed,
    Conv,
    Experts,
    Recurrent,
    ExpertsGemv,
    ExpertsGemm,
    ExpertsStream,
    ExpertsDecode,
    Sparse,
    DeltaChunks,
    GemmHeads,
}

/// How many kernel files there are.
pub(super) const FILES: usize = 26;

/// The sources, in the order of [`KernelFile`]; scripts/cuda-images has the same list.
const SOURCES: [KernelSource; FILES] = [
    source(kernel_text!("elementwise.cu"), &[GATE]),
    source(kernel_text!("norm.cu"), &[]),
    source(kernel_text!("rope.cu"), &[ROPE]),
    source(kernel_text!("rows.cu"), &[QUANTIZE]),
    source(kernel_text!("reduce.cu"), &[ORDER]),
    source(kernel_text!("matmul.cu"), &[]),
    source(kernel_text!("pack.cu"), &[]),
    source(kernel_text!("attention.cu"), &[ROPE, ATTENTION, PAGES, DECODE_TOKEN]),
    source(kernel_text!("attention_mma.cu"), &[MMA, ATTENTION, PAGES]),
    source(kernel_text!("attention_decode.cu"), &[MMA, ROPE, ATTENTION, DECODE_TOKEN]),
    source(kernel_text!("attention_grouped.cu"), &[MMA, ATTENTION, PAGES]),
    source(kernel_text!("attention_paged.cu"), &[MMA, ATTENTION, PAGES]),
    source(kernel_text!("gemv_streamed.cu"), &[MBARRIER, ACTIVATIONS]),
    source(kernel_text!("gemm.cu"), &[MMA]),
    source(kernel_text!("gemm_wgmma.cu"), &[MBARRIER, WGMMA]),
    source(kernel_text!("gemm_mixed.cu"), &[GATE, MBARRIER, WGMMA, GEMM_MIXED]),
    source(kernel_text!("conv.cu"), &[]),
    source(kernel_text!("experts.cu"), &[ORDER, ROUTE]),
    source(kernel_text!("recurrent.cu"), &[]),
    source(kernel_text!("experts_gemv.cu"), &[GATE, ACTIVATIONS, EXPERT_GEMV]),
    source(kernel_text!("experts_gemm.cu"), &[MMA]),
    source(kernel_text!("experts_stream.cu"), &[]),
    source(kernel_text!("experts_decode.cu"), &[MBARRIER, GATE, ACTIVATIONS, EXPERT_GEMV, ORDER, ROUTE]),
    source(kernel_text!("sparse.cu"), &[]),
    source(kernel_text!("delta_chunks.cu"), &[MMA, SPLIT]),
    source(kernel_text!("gemm_heads.cu"), &[MMA, SPLIT]),
];

impl KernelFile {
    /// All files, in their order.
    #[cfg(test)]
    pub(super) const ALL: [KernelFile; FILES] = [
        KernelFile::Elementwise,
        KernelFile::Norm,
        KernelFile::Rope,
        KernelFile::Rows,
        KernelFile::Reduce,
        KernelFile::Matmul,
        KernelFile::Pack,
        KernelFile::Attention,
        KernelFile::AttentionMma,
        KernelFile::AttentionDecode,
        KernelFile::AttentionGrouped,
        KernelFile::AttentionPaged,
        KernelFile::GemvStreamed,
        KernelFile::Gemm,
        KernelFile::GemmWgmma,
        KernelFile::GemmMixed,
        KernelFile::Conv,
        KernelFile::Experts,
        KernelFile::Recurrent,
        KernelFile::ExpertsGemv,
        KernelFile::ExpertsGemm,
        KernelFile::ExpertsStream,
        KernelFile::ExpertsDecode,
        KernelFile::Sparse,
        KernelFile::DeltaChunks,
        KernelFile::GemmHeads,
    ];

    fn source(self) -> &'static KernelSource {
        // Every file has its source, as a test checks.
        SOURCES.get(self as usize).unwrap_or(&const { source(("", ""), &[]) })
    }

    /// Its name, with ".cu".
    pub(super) fn name(self) -> &'static str {
        self.source().name
    }

    /// Its text, with all headers.
    pub(super) fn text(self) -> String {
        let source = self.source();
        let own = (source.name, source.text);
        let texts = HEADERS.iter().chain(source.headers).chain([&own]);
        texts.map(|(name, text)| format!("#line 1 \"{name}\"\n{text}\n")).collect()
    }

    /// The compiler's options, without the architecture.
    pub(super) fn options(self) -> [&'static str; 2] {
        // Conversions from and to block formats give the same bits on host and device: no fused multiply-add there.
        let exact = matches!(self, KernelFile::Rows | KernelFile::Pack);
        ["--std=c++17", if exact { "--fmad=false" } else { "--fmad=true" }]
    }

    /// A hash of text, architecture and options, and of the compiler's version: what decides over the compiled code.
    pub(super) fn hash(self, architecture: &str, compiler: &str) -> String {
        let mut hash = Sha256::new();
        for part in [self.text().as_str(), architecture, &self.options().join(" "), compiler] {
            hash.update(part);
            hash.update([0]);
        }
        hex(&hash.finalize())
    }
}

/// Bytes as hexadecimal digits.
pub(super) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_file_has_its_source() {
        for (at, file) in KernelFile::ALL.into_iter().enumerate() {
            assert_eq!(file as usize, at);
            let stem: String = format!("{file:?}")
                .chars()
                .flat_map(|c| [c.is_uppercase().then_some('_'), Some(c.to_ascii_lowercase())])
                .flatten()
                .collect();
            assert_eq!(file.name(), format!("{}.cu", stem.trim_start_matches('_')));
            assert!(file.text().contains("__global__"));
        }
    }

    #[test]
    fn hashes_differ_by_text_architecture_options_and_compiler() {
        let norm = KernelFile::Norm;
        assert_eq!(norm.hash("sm_80", "12.9"), norm.hash("sm_80", "12.9"));
        assert_ne!(norm.hash("sm_80", "12.9"), norm.hash("sm_90", "12.9"));
        assert_ne!(norm.hash("sm_80", "12.9"), norm.hash("sm_80", "12.0"));
        assert_ne!(norm.hash("sm_80", "12.9"), KernelFile::Rows.hash("sm_80", "12.9"));
        assert_ne!(norm.hash("sm_80", "12.9"), norm.hash("sm_8012.9", ""));
    }
}
