//! Nodes as the functions of a backend see them.

use std::ffi::{CString, c_char, c_void};

use quadriga::graph::{Graph, NodeId, Op, Tensor, TensorId, TensorKind, Window};

use crate::arguments::c_text;
use crate::tensor::qd_tensor_info;

/// Set by the caller before each run.
pub const QD_TENSOR_INPUT: i32 = 0;
/// A parameter.
pub const QD_TENSOR_WEIGHT: i32 = 1;
/// A constant of the graph.
pub const QD_TENSOR_CONSTANT: i32 = 2;
/// Keeps its content between runs.
pub const QD_TENSOR_STATE: i32 = 3;
/// The result of a node.
pub const QD_TENSOR_COMPUTED: i32 = 4;

/// A tensor of a node: what it is, and where.
#[repr(C)]
pub struct qd_operand {
    /// Type, shape and byte strides.
    pub info: qd_tensor_info,
    /// QD_TENSOR_….
    pub kind: i32,
    /// Its name.
    pub name: *const c_char,
    /// What the backend's `allocate` returned; NULL when `supports` is asked.
    pub buffer: *mut c_void,
    /// Bytes from the start of the buffer to the first element.
    pub offset: usize,
}

/// A number that an operation has.
#[repr(C)]
pub struct qd_parameter {
    /// Its name, such as "eps".
    pub name: *const c_char,
    /// The number; flags are 0 or 1.
    pub value: f64,
}

/// A node: an operation on tensors. A result may have the memory of an input that nothing else needs.
#[repr(C)]
pub struct qd_node {
    /// The operation, such as "add", "silu" or "mul_mat".
    pub operation: *const c_char,
    /// The name of the result, for messages.
    pub name: *const c_char,
    /// 1 if the result is a view of an input: nothing is to be computed.
    pub is_view: i32,
    /// 1 if the result is read after the nodes that are compiled together. A backend that fuses nodes need not write others.
    pub kept: i32,
    /// The inputs. Those that are optional follow the others, as the builder's function has them.
    pub inputs: *const qd_operand,
    /// How many.
    pub input_count: usize,
    /// The result.
    pub output: qd_operand,
    /// The operation's numbers.
    pub parameters: *const qd_parameter,
    /// How many.
    pub parameter_count: usize,
}

/// A number of a node's operation by name, such as "eps"; `otherwise` if it has none of this name.
///
/// Threads: any.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qd_node_parameter(
    node: Option<&qd_node>,
    name: *const c_char,
    otherwise: f64,
) -> f64 {
    crate::guard::value(otherwise, || {
        let node = crate::arguments::required(node, "node")?;
        // SAFETY: the rules of the header for texts; the node's own array is the library's.
        let (name, parameters) = unsafe {
            (
                crate::arguments::text(name, "name")?,
                crate::arguments::array(node.parameters, node.parameter_count, "parameters")?,
            )
        };
        for parameter in parameters {
            // SAFETY: names of parameters are the library's own texts.
            if unsafe { crate::arguments::text(parameter.name, "a parameter") }? == name {
                return Ok(parameter.value);
            }
        }
        Ok(otherwise)
    })
}

/// Where a tensor is: the backend's own buffer, and an offset.
#[derive(Clone, Copy)]
pub(crate) struct BufferPlace {
    pub(crate) buffer: *mut c_void,
    pub(crate) offset: usize,
}

/// A node with everything that its description points to. It does not move: the description has its addresses.
pub(crate) struct NodeDescription {
    node: qd_node,
    _operands: Box<[qd_operand]>,
    _parameters: Box<[qd_parameter]>,
    _texts: Vec<CString>,
}

// SAFETY: the addresses are those of its own parts, which do not change, and of the backend's buffers, which are only given
// back to the backend.
unsafe impl Send for NodeDescription {}

impl NodeDescription {
    /// A node, with the places of its tensors where they are known.
    pub(crate) fn new(
        graph: &Graph,
        id: NodeId,
        kept: bool,
        place: &dyn Fn(TensorId) -> Option<BufferPlace>,
    ) -> Option<NodeDescription> {
        let node = graph.get_node(id)?;
        let mut texts = vec![c_text(node.op().name()), c_text(&graph.node_name(id))];
        let mut operand = |tensor: TensorId| {
            let described = graph.get(tensor)?;
            let name = c_text(&graph.name(tensor));
            let place = place(tensor).unwrap_or(BufferPlace { buffer: std::ptr::null_mut(), offset: 0 });
            let operand = qd_operand {
                info: qd_tensor_info::of(described),
                kind: kind_code(described),
                name: name.as_ptr(),
                buffer: place.buffer,
                offset: place.offset,
            };
            // Its bytes stay where they are when the list of texts grows.
            texts.push(name);
            Some(operand)
        };
        let inputs: Option<Box<[qd_operand]>> =
            graph.inputs(id).iter().map(|input| operand(*input)).collect();
        let (inputs, output) = (inputs?, operand(node.output())?);
        let mut parameters = Vec::new();
        for (name, value) in numbers(node.op()) {
            let name = c_text(name);
            parameters.push(qd_parameter { name: name.as_ptr(), value });
            texts.push(name);
        }
        let parameters: Box<[qd_parameter]> = parameters.into();
        let text = |index: usize| texts.get(index).map_or(std::ptr::null(), |text: &CString| text.as_ptr());
        let described = qd_node {
            operation: text(0),
            name: text(1),
            is_view: node.op().is_view().into(),
            kept: kept.into(),
            inputs: inputs.as_ptr(),
            input_count: inputs.len(),
            output,
            parameters: parameters.as_ptr(),
            parameter_count: parameters.len(),
        };
        Some(NodeDescription { node: described, _operands: inputs, _parameters: parameters, _texts: texts })
    }

    /// The description.
    pub(crate) fn node(&self) -> &qd_node {
        &self.node
    }
}

fn kind_code(tensor: &Tensor) -> i32 {
    match tensor.kind() {
        TensorKind::Input => QD_TENSOR_INPUT,
        TensorKind::Weight => QD_TENSOR_WEIGHT,
        TensorKind::Constant => QD_TENSOR_CONSTANT,
        TensorKind::State => QD_TENSOR_STATE,
        TensorKind::Computed(_) => QD_TENSOR_COMPUTED,
    }
}

/// The numbers of an operation, by name.
fn numbers(op: &Op) -> Vec<(&'static str, f64)> {
    let flag = |flag: bool| f64::from(u8::from(flag));
    let float = |value: f32| f64::from(value);
    let count = |value: usize| value as f64;
    match op {
        Op::Scale { scale, bias } => vec![("scale", float(*scale)), ("bias", float(*bias))],
        Op::Clamp { min, max } => vec![("min", float(*min)), ("max", float(*max))],
        Op::Gated { swapped, .. } => vec![("swapped", flag(*swapped))],
        Op::Norm { eps } | Op::RmsNorm { eps } | Op::L2Norm { eps } => vec![("eps", float(*eps))],
        Op::GroupNorm { groups, eps } => vec![("groups", count(*groups)), ("eps", float(*eps))],
        Op::SoftMax { scale, mask, sinks } => {
            vec![("scale", float(*scale)), ("mask", flag(*mask)), ("sinks", flag(*sinks))]
        }
        Op::Rope { rope, factors } => vec![
            ("dims", count(rope.dims)),
            ("half", flag(rope.pairing == quadriga::graph::Pairing::Half)),
            ("base", float(rope.base)),
            ("scale", float(rope.scale)),
            ("ext_factor", float(rope.ext_factor)),
            ("attn_factor", float(rope.attn_factor)),
            ("beta_fast", float(rope.beta_fast)),
            ("beta_slow", float(rope.beta_slow)),
            ("original_context", count(rope.original_context)),
            ("factors", flag(*factors)),
        ],
        Op::DiagMaskInf { past } | Op::DiagMaskZero { past } => vec![("past", count(*past))],
        Op::MulMatSparse { ids } => vec![("ids", flag(*ids))],
        Op::SelectExperts(select) => vec![
            ("used", count(select.used)),
            ("groups", count(select.groups)),
            ("groups_used", count(select.groups_used)),
            ("group_scores", count(select.group_score.summed())),
        ],
        Op::ExpertWeights(weights) => vec![
            ("softmax", flag(weights.softmax)),
            ("normalize", flag(weights.normalize)),
            ("scale", float(weights.scale)),
        ],
        Op::GatedDeltaRule(rule) => {
            vec![("scale", float(rule.scale)), ("tiled", flag(rule.tiled)), ("delta", flag(rule.delta))]
        }
        Op::Concat { axis4 } => vec![("axis4", count(*axis4))],
        Op::Pad { before: [b0, b1, b2, b3], .. } => vec![
            ("before0", count(*b0)),
            ("before1", count(*b1)),
            ("before2", count(*b2)),
            ("before3", count(*b3)),
        ],
        Op::ArgSort { order } => vec![("descending", flag(*order == quadriga::graph::Order::Descending))],
        Op::TopK { k } => vec![("k", count(*k))],
        Op::Attention(attention) => vec![
            ("scale", float(attention.scale)),
            ("soft_cap", attention.soft_cap.map_or(0.0, float)),
            ("mask", flag(attention.mask)),
            ("spans", flag(attention.spans)),
            ("sinks", flag(attention.sinks)),
            ("pages", flag(attention.pages)),
        ],
        Op::Im2Col { window, .. } | Op::ConvDepthwise { window } | Op::Pool { window, .. } => {
            window_numbers(window, op)
        }
        Op::ConvTranspose { stride: [height, width] } => {
            vec![("stride_height", count(*height)), ("stride_width", count(*width))]
        }
        Op::Upscale { interpolation, .. } => {
            vec![("bilinear", flag(*interpolation == quadriga::graph::Interpolation::Bilinear))]
        }
        Op::Arange { start, step, .. } => vec![("start", float(*start)), ("step", float(*step))],
        _ => Vec::new(),
    }
}

fn window_numbers(window: &Window, op: &Op) -> Vec<(&'static str, f64)> {
    let inside = matches!(op, Op::Pool { pooling: quadriga::graph::Pooling::AverageInside, .. });
    let numbers = [
        ("kernel_height", window.kernel[0]),
        ("kernel_width", window.kernel[1]),
        ("stride_height", window.stride[0]),
        ("stride_width", window.stride[1]),
        ("padding_height", window.padding[0]),
        ("padding_width", window.padding[1]),
        ("dilation_height", window.dilation[0]),
        ("dilation_width", window.dilation[1]),
        ("inside", usize::from(inside)),
    ];
    numbers.into_iter().map(|(name, value)| (name, value as f64)).collect()
}
