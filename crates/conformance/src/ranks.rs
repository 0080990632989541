//! Cases of several ranks: each rank is a thread.

use std::sync::Arc;
use std::time::Duration;

use quadriga_cluster::{Collectives, Communicator, Limits, in_process};
use quadriga_runtime::RankGroup;

use crate::{Case, Outputs, RankPart, TargetError};

/// How long an exchange may take before a case has failed: ranks that never meet would wait for ever.
const PATIENCE: Duration = Duration::from_secs(60);

/// Runs each rank's part of a case on a thread, with communicators in this process, and returns the outputs of all ranks, in order.
///
/// A rank that fails ends the others, which wait for it.
///
/// # Errors
/// That of the rank that failed first.
pub fn on_rank_threads(
    case: &Case,
    run: impl Fn(usize, RankPart<'_>, Arc<dyn RankGroup>) -> Result<Outputs, TargetError> + Sync,
) -> Result<Outputs, TargetError> {
    let parts: Vec<RankPart<'_>> = case.parts().collect();
    let limits = Limits { operation: Some(PATIENCE), ..Limits::default() };
    let ranks = in_process(parts.len(), limits).into_iter().zip(parts).enumerate();
    let run = &run;
    let results: Vec<Result<Outputs, TargetError>> = std::thread::scope(|scope| {
        let start = |(rank, (communicator, part)): (usize, (_, RankPart<'_>))| {
            let communicator: Arc<dyn Communicator> = Arc::new(communicator);
            let group = Arc::new(Collectives::new(Arc::clone(&communicator)));
            let result = run(rank, part, group);
            if let Err(TargetError::Unsupported(text) | TargetError::Failed(text)) = &result
                && communicator.failure().is_none()
            {
                communicator.fail(text);
            }
            result
        };
        let threads: Vec<_> = ranks.map(|rank| scope.spawn(move || start(rank))).collect();
        let panicked = || Err(TargetError::Failed("a rank panicked".to_owned()));
        threads.into_iter().map(|thread| thread.join().unwrap_or_else(|_| panicked())).collect()
    });
    // The others fail because of the first; an error of another rank names it.
    let unsupported = results.iter().find(|result| matches!(result, Err(TargetError::Unsupported(_))));
    if let Some(unsupported) = unsupported {
        return unsupported.clone();
    }
    results.into_iter().try_fold(Outputs::new(), |mut all, outputs| {
        all.extend(outputs?);
        Ok(all)
    })
}
