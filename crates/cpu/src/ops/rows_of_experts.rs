//! Which expert a row goes to.

use crate::view::View;

/// The expert of token `t`, choice `u`, checked.
pub(super) fn expert(ids: &View, t: usize, u: usize, experts: usize) -> Result<usize, String> {
    let id = ids.index([0, 0, t], u);
    usize::try_from(id)
        .ok()
        .filter(|expert| *expert < experts)
        .ok_or_else(|| format!("expert {id} of token {t} is outside 0..{experts}"))
}
