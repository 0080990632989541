//! Operations on the rows of active neurons, as methods of a value.

use crate::ops::Op;
use crate::value::Value;

/// Methods for feed-forward networks of which few neurons are active: `t` tokens, `n` neurons.
impl<'g> Value<'g> {
    /// These rows `[m, k]` times `x [t, k]` and times their gates `[t, n]`: `[t, m]`. Row `i` is that of neuron `i`, or of
    /// neuron `ids[i]`; rows whose gates are 0 are not read. See [`Op::MulMatSparse`].
    #[track_caller]
    pub fn mul_mat_sparse(self, x: Value<'g>, gates: Value<'g>, ids: Option<Value<'g>>) -> Value<'g> {
        match ids {
            None => self.op(Op::MulMatSparse { ids: false }, &[self, x, gates]),
            Some(ids) => self.op(Op::MulMatSparse { ids: true }, &[self, x, gates, ids]),
        }
    }

    /// The sum of these rows `[n, k]` times factors `[t, n]`: `[t, k]`. Rows whose factors are 0 are not read.
    #[track_caller]
    pub fn axpy_sparse(self, factors: Value<'g>) -> Value<'g> {
        self.op(Op::AxpySparse, &[self, factors])
    }
}
