//! How this process was started.

use std::env;

/// The family of the launcher that started this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Launch {
    /// Open MPI's `mpirun`.
    OpenMpi,
    /// Hydra, the `mpirun` of MPICH and its relatives, or another that speaks PMI.
    Mpich,
    /// Slurm's `srun`, or another that speaks PMIx, which both families understand.
    Pmix,
}

/// The launcher that started this process, and as one of how many ranks; `None` if it was started alone.
pub fn launched() -> Option<(Launch, usize)> {
    launch_of(|name| env::var(name).ok())
}

/// This process's number among those that its launcher started; `None` if it was started alone.
pub fn launched_rank() -> Option<usize> {
    rank_of(|name| env::var(name).ok())
}

/// How many processes Slurm's `srun` started without a way for them to find each other, if this is the first of them: each is alone.
pub fn unconnected_tasks() -> Option<usize> {
    unconnected(|name| env::var(name).ok())
}

/// Whether a launcher of ranks started this process, though it be the only rank.
pub fn has_launcher() -> bool {
    ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK"].iter().any(|name| env::var_os(name).is_some())
}

fn launch_of(variable: impl Fn(&str) -> Option<String>) -> Option<(Launch, usize)> {
    let ranks = |name: &str| variable(name)?.parse::<usize>().ok().filter(|ranks| *ranks > 1);
    if let Some(ranks) = ranks("OMPI_COMM_WORLD_SIZE") {
        Some((Launch::OpenMpi, ranks))
    } else if let Some(ranks) = ranks("PMI_SIZE") {
        Some((Launch::Mpich, ranks))
    } else {
        // Without PMIx, srun starts processes that know nothing of each other.
        variable("PMIX_RANK")?;
        ranks("SLURM_STEP_NUM_TASKS").map(|ranks| (Launch::Pmix, ranks))
    }
}

fn rank_of(variable: impl Fn(&str) -> Option<String>) -> Option<usize> {
    let name = match launch_of(&variable)?.0 {
        Launch::OpenMpi => "OMPI_COMM_WORLD_RANK",
        Launch::Mpich => "PMI_RANK",
        Launch::Pmix => "PMIX_RANK",
    };
    variable(name)?.parse().ok()
}

fn unconnected(variable: impl Fn(&str) -> Option<String>) -> Option<usize> {
    let number = |name: &str| variable(name)?.parse::<usize>().ok();
    let alone = launch_of(&variable).is_none() && number("SLURM_PROCID") == Some(0);
    number("SLURM_STEP_NUM_TASKS").filter(|tasks| alone && *tasks > 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of<'a>(variables: &'a [(&str, &str)]) -> impl Fn(&str) -> Option<String> + 'a {
        |name| variables.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned())
    }

    fn launch(variables: &[(&str, &str)]) -> Option<(Launch, usize)> {
        launch_of(of(variables))
    }

    #[test]
    fn ranks_know_their_number_before_they_meet() {
        assert_eq!(rank_of(of(&[("PMI_SIZE", "4"), ("PMI_RANK", "3")])), Some(3));
        assert_eq!(rank_of(of(&[("OMPI_COMM_WORLD_SIZE", "2"), ("OMPI_COMM_WORLD_RANK", "0")])), Some(0));
        assert_eq!(rank_of(of(&[("PMIX_RANK", "1"), ("SLURM_STEP_NUM_TASKS", "2")])), Some(1));
        assert_eq!(rank_of(of(&[("PMI_RANK", "1")])), None);
    }

    #[test]
    fn tasks_of_srun_without_a_way_to_each_other_are_noticed_once() {
        let tasks = [("SLURM_STEP_NUM_TASKS", "4"), ("SLURM_PROCID", "0")];
        assert_eq!(unconnected(of(&tasks)), Some(4));
        assert_eq!(unconnected(of(&[("SLURM_STEP_NUM_TASKS", "4"), ("SLURM_PROCID", "1")])), None);
        assert_eq!(unconnected(of(&[("SLURM_STEP_NUM_TASKS", "1"), ("SLURM_PROCID", "0")])), None);
        assert_eq!(unconnected(of(&[&tasks[..], &[("PMIX_RANK", "0")]].concat())), None);
    }

    #[test]
    fn a_process_alone_is_no_rank() {
        assert_eq!(launch(&[]), None);
        assert_eq!(launch(&[("PMI_SIZE", "1")]), None);
        assert_eq!(launch(&[("OMPI_COMM_WORLD_SIZE", "x")]), None);
        assert_eq!(launch(&[("SLURM_STEP_NUM_TASKS", "4")]), None);
    }

    #[test]
    fn launchers_are_told_by_their_variables() {
        assert_eq!(launch(&[("OMPI_COMM_WORLD_SIZE", "2"), ("PMIX_RANK", "0")]), Some((Launch::OpenMpi, 2)));
        assert_eq!(launch(&[("PMI_SIZE", "4")]), Some((Launch::Mpich, 4)));
        assert_eq!(launch(&[("PMIX_RANK", "1"), ("SLURM_STEP_NUM_TASKS", "2")]), Some((Launch::Pmix, 2)));
    }
}
