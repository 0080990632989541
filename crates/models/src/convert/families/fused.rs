//! Experts whose matrices are one tensor in the model's files.

use super::super::builder::FileBuilder;
use super::super::error::ConvertResult;
use super::super::output::{OutputTensor, RowSource};
use super::super::source::{Source, wrong_shape};

/// How gate and up are in one tensor.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum FusedLayout {
    /// `[experts, 2 · width, inputs]`, rows of the gate first.
    Rows,
    /// `[experts, inputs, 2 · width]`, columns of the gate first.
    Columns,
    /// `[experts, inputs, 2 · width]`, columns of gate and up in turn.
    AlternatingColumns,
    /// `[experts, 2 · width, inputs]`, rows of gate and up in turn.
    AlternatingRows,
}

/// Gate or up of a tensor that holds both: `[experts, width, inputs]`.
pub(super) fn half(
    name: &str,
    source: &Source,
    layout: FusedLayout,
    second: bool,
) -> ConvertResult<OutputTensor> {
    let [experts, outer, inner] = *source.shape.as_slice() else {
        return Err(wrong_shape(source, "[experts, ·, ·]"));
    };
    let by_rows = matches!(layout, FusedLayout::Rows | FusedLayout::AlternatingRows);
    let (both, inputs) = if by_rows { (outer, inner) } else { (inner, outer) };
    if !both.is_multiple_of(2) || both == 0 {
        return Err(wrong_shape(source, "gate and up of equal widths"));
    }
    let width = both / 2;
    let place = move |neuron: usize| match layout {
        FusedLayout::Rows | FusedLayout::Columns => neuron + usize::from(second) * width,
        FusedLayout::AlternatingRows | FusedLayout::AlternatingColumns => 2 * neuron + usize::from(second),
    };
    Ok(OutputTensor::rows(name, vec![experts, width, inputs], vec![source.clone()], move |row| {
        let (expert, neuron) = (row / width, row % width);
        let matrix = expert * both * inputs;
        match by_rows {
            true => RowSource { source: 0, start: matrix + place(neuron) * inputs, step: 1 },
            false => RowSource { source: 0, start: matrix + place(neuron), step: both },
        }
    }))
}

/// The matrices of all experts, each transposed.
pub(super) fn transposed(name: &str, source: Source) -> ConvertResult<OutputTensor> {
    let [experts, rows, columns] = *source.shape.as_slice() else {
        return Err(wrong_shape(&source, "[experts, ·, ·]"));
    };
    Ok(OutputTensor::rows(name, vec![experts, columns, rows], vec![source], move |row| RowSource {
        source: 0,
        start: row / columns * rows * columns + row % columns,
        step: columns,
    }))
}

/// Every second element of each row, from the first or the second on.
pub(super) fn alternate(name: &str, source: Source, second: bool) -> ConvertResult<OutputTensor> {
    let [rows, columns] = *source.shape.as_slice() else {
        return Err(wrong_shape(&source, "[experts, ·]"));
    };
    Ok(OutputTensor::rows(name, vec![rows, columns / 2], vec![source], move |row| RowSource {
        source: 0,
        start: row * columns + usize::from(second),
        step: 2,
    }))
}

/// Adds experts that are one tensor for gate and up and one for down, if they are there.
pub(super) fn fused_experts(
    builder: &mut FileBuilder<'_>,
    from: &str,
    layer: usize,
    layout: FusedLayout,
) -> ConvertResult<bool> {
    let find = |builder: &FileBuilder<'_>, part: &str| -> ConvertResult<Option<Source>> {
        let plain = builder.find(&format!("{from}{part}"))?;
        if plain.is_some() { Ok(plain) } else { builder.find(&format!("{from}{part}.weight")) }
    };
    let Some(both) = find(builder, "gate_up_proj")? else { return Ok(false) };
    builder.push(half(&format!("blk.{layer}.ffn_gate_exps.weight"), &both, layout, false)?);
    builder.push(half(&format!("blk.{layer}.ffn_up_exps.weight"), &both, layout, true)?);
    let name = format!("blk.{layer}.ffn_down_exps.weight");
    if let Some(down) = find(builder, "down_proj")? {
        let by_rows = matches!(layout, FusedLayout::Rows | FusedLayout::AlternatingRows);
        builder.push(if by_rows { OutputTensor::whole(&name, down) } else { transposed(&name, down)? });
    }
    Ok(true)
}
