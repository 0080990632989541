//! The rows of results that an engine has read.

use crate::{Error, Result};

/// Makes room for so many rows; an error if there is no memory for them.
pub(crate) fn resize(results: &mut Vec<f32>, rows: usize, width: usize) -> Result<()> {
    let refused = || Error::OutputMemory { rows, width };
    let len = rows.checked_mul(width).ok_or_else(refused)?;
    results.try_reserve_exact(len.saturating_sub(results.len())).map_err(|_| refused())?;
    results.resize(len, 0.0);
    Ok(())
}

/// One of the rows of results; empty if there is no such row.
pub(crate) fn row_of(all: &[f32], width: usize, row: usize) -> &[f32] {
    let start = row.saturating_mul(width);
    all.get(start..start.saturating_add(width)).unwrap_or(&[])
}

#[cfg(test)]
mod tests {
    use super::resize;
    use crate::Error;

    #[test]
    fn results_that_do_not_fit_memory_are_an_error() {
        let mut results = vec![1.0];
        for rows in [usize::MAX, usize::MAX / 32, 1 << 45] {
            let refused = resize(&mut results, rows, 1 << 10);
            assert!(matches!(refused, Err(Error::OutputMemory { width: 1024, .. })), "{rows} rows");
            assert_eq!(results, [1.0]);
        }
        assert!(resize(&mut results, 2, 3).is_ok());
        assert_eq!(results.len(), 6);
    }
}
