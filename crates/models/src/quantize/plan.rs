//! Decides the type of every tensor before anything is written.

use quadriga_gguf::{File, Tensor};
use quadriga_graph::{DType, Shape};

use super::file_type::FileType;
use super::mix::{Mix, MixModel, fallback, is_quantizable};
use super::options::QuantizeOptions;
use crate::error::{QuantizeError, Result};
use crate::importance::ImportanceMatrix;

/// What becomes of one tensor.
#[derive(Clone, Debug)]
pub struct TensorPlan {
    /// The name in the output.
    pub name: String,
    /// The name in the input: another one behind layers that are pruned.
    pub source: String,
    /// The dimensions, outermost first.
    pub shape: Shape,
    /// The type in the input.
    pub from: DType,
    /// The type in the output.
    pub to: DType,
    /// The type that the mix wanted and that the length of the rows does not allow.
    pub wanted: Option<DType>,
    /// Whether the tensor could have another type: a matrix, and neither norm nor router.
    pub is_quantizable: bool,
    /// Whether the options, or the tensor, leave no choice of the type.
    pub is_fixed: bool,
}

impl TensorPlan {
    /// The bytes in the output.
    pub fn byte_len(&self) -> u64 {
        self.byte_len_as(self.to)
    }

    /// The bytes that the tensor would take as another type; none if its rows are not whole blocks of it.
    pub fn byte_len_as(&self, dtype: DType) -> u64 {
        let row_len = self.row_len();
        let rows = self.shape.elements() / row_len.max(1);
        (dtype.row_bytes(row_len).unwrap_or_default() as u64).saturating_mul(rows as u64)
    }

    /// The length of a row.
    pub fn row_len(&self) -> usize {
        self.shape.dims().last().copied().unwrap_or_default()
    }
}

/// What becomes of all tensors of a file, in its order.
#[derive(Clone, Debug)]
pub struct QuantizePlan {
    /// The tensors.
    pub tensors: Vec<TensorPlan>,
}

impl QuantizePlan {
    /// The bytes of all tensors in the output.
    pub fn byte_len(&self) -> u64 {
        self.tensors.iter().map(TensorPlan::byte_len).sum()
    }

    /// Bits per weight of the output.
    pub fn bits_per_weight(&self) -> f64 {
        let elements: u64 = self.tensors.iter().map(|tensor| tensor.shape.elements() as u64).sum();
        self.byte_len() as f64 * 8.0 / elements.max(1) as f64
    }

    /// What the file is by the type that takes most of its bytes.
    pub fn main_type(&self) -> Option<FileType> {
        let quantized = || self.tensors.iter().filter(|tensor| tensor.is_quantizable);
        let bytes = |dtype: DType| -> u64 {
            quantized().filter(|tensor| tensor.to == dtype).map(TensorPlan::byte_len).sum()
        };
        let most = quantized().map(|tensor| tensor.to).max_by_key(|dtype| bytes(*dtype));
        most.and_then(FileType::of)
    }

    /// What the file is, of which this was asked: where no tensor has its type, because rows are too short for it or the options
    /// chose others, the type of most bytes.
    pub fn file_type(&self, asked: FileType) -> FileType {
        let mut quantized = self.tensors.iter().filter(|tensor| tensor.is_quantizable);
        if quantized.any(|tensor| tensor.to == asked.dtype()) {
            return asked;
        }
        self.main_type().unwrap_or(asked)
    }

    /// The tensors of the input, in the order of the plan.
    pub(crate) fn sources<'f>(&self, file: &'f File) -> std::result::Result<Vec<Tensor<'f>>, QuantizeError> {
        let find = |plan: &TensorPlan| {
            file.find_tensor(&plan.source)
                .ok_or_else(|| QuantizeError::OtherFile { name: plan.source.clone() })
        };
        self.tensors.iter().map(find).collect()
    }

    /// Decides all types.
    pub fn new(
        file: &File,
        options: &QuantizeOptions,
        importance: Option<&ImportanceMatrix>,
    ) -> Result<QuantizePlan> {
        let kept: Vec<(String, Tensor<'_>)> = file
            .tensors()
            .filter_map(|tensor| Some((options.pruned.rename(tensor.name())?, tensor)))
            .collect();
        let shapes: Vec<Shape> = kept.iter().map(|(_, tensor)| tensor.shape()).collect();
        let model = model_of(file, importance.is_some())?;
        options.pruned.check(model.layers)?;
        let names = kept.iter().map(|(name, _)| name.as_str()).zip(&shapes);
        let mix = Mix::new(options.file_type, model, names);
        let tied = file.find_tensor("output.weight").is_none();
        let tensors = kept.iter().map(|(name, tensor)| decide(name, tensor, &mix, options, tied));
        Ok(QuantizePlan { tensors: tensors.collect::<Result<_>>()? })
    }
}

/// What the rules of mixes need to know about the model in a file.
pub(crate) fn model_of(file: &File, has_importance: bool) -> Result<MixModel> {
    let architecture = file.find::<&str>("general.architecture")?.unwrap_or_default().to_owned();
    let number = |key: &str| {
        let value = file.value(&format!("{architecture}.{key}"))?;
        // Numbers of heads may differ between layers: the first counts.
        let value = match value {
            quadriga_gguf::Value::Array(array) => array.iter().next()?,
            value => value,
        };
        value.integer().and_then(|number| usize::try_from(number).ok())
    };
    let heads = number("attention.head_count").unwrap_or(1);
    let kv_heads = number("attention.head_count_kv").unwrap_or(heads);
    Ok(MixModel {
        layers: number("block_count").unwrap_or_default(),
        experts: number("expert_count").unwrap_or_default(),
        // A first layer without attention has no heads, which counts as none per KV head.
        heads_per_kv_head: heads.checked_div(kv_heads).unwrap_or(0),
        has_importance,
        architecture,
    })
}

fn decide(
    name: &str,
    tensor: &Tensor<'_>,
    mix: &Mix,
    options: &QuantizeOptions,
    tied: bool,
) -> Result<TensorPlan> {
    let (shape, from) = (tensor.shape(), tensor.dtype());
    let mut plan = TensorPlan {
        name: name.to_owned(),
        source: tensor.name().to_owned(),
        shape,
        from,
        to: from,
        wanted: None,
        is_quantizable: is_quantizable(name, &shape) && from.is_computable(),
        is_fixed: true,
    };
    let left = options.leave_output && name == "output.weight";
    if !plan.is_quantizable || left || options.only_copy {
        return Ok(plan);
    }
    let is_embedding = matches!(name, "token_embd.weight" | "per_layer_token_embd.weight");
    let is_output =
        name == "output.weight" || (tied && name == "token_embd.weight" && options.embedding_type.is_none());
    let fixed = match (options.embedding_type, options.output_type) {
        (Some(dtype), _) if is_embedding => Some(dtype),
        (_, Some(dtype)) if is_output && (name == "output.weight" || !options.pure) => Some(dtype),
        _ => None,
    };
    let quantizes = options.file_type.dtype().is_quantized();
    let manual = options.tensor_types.iter().find(|rule| rule.pattern.is_match(name)).map(|rule| rule.dtype);
    let wanted = match (fixed, manual) {
        (Some(dtype), _) => dtype,
        (None, Some(dtype)) => dtype,
        (None, None) if options.pure || !quantizes => options.file_type.dtype(),
        (None, None) => mix.choose(name, &shape),
    };
    plan.is_fixed = fixed.is_some() || manual.is_some();
    plan.to = fallback(wanted, plan.row_len());
    plan.wanted = (plan.to != wanted).then_some(wanted);
    if plan.to != from && from.is_quantized() && !options.allow_requantize {
        return Err(QuantizeError::Requantize { tensor: name.to_owned(), dtype: from }.into());
    }
    Ok(plan)
}
