//! What each of several ranks has to compute with: its speed, its memory, and the devices that it shares with others.

use quadriga_llm::RankResources;
use quadriga_llm::placement::Devices;
use quadriga_runtime::{DeviceKind, Rates};
use sha2::{Digest, Sha256};

/// Ranks of which none is this much faster than another are alike.
const SAME_SPEED: f64 = 1.25;
/// The most accelerators of a rank that are told to others.
const MOST_ACCELERATORS: usize = 16;
/// Bytes by which ranks recognise an accelerator.
const KEY: usize = 8;
/// Numbers of a rank that are told to others.
const NUMBERS: usize = 8;

/// What a rank has to compute with. Numbers are 0 where they are not known.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub(crate) struct RankDevices {
    /// Threads of its CPU backend.
    pub(crate) threads: f32,
    /// Bytes per second of its fastest device: as measured, or for accelerators as they are known to read.
    read: f32,
    /// Bytes that are free on all of its devices.
    free: f32,
    /// 1 if it has accelerators.
    accelerated: f32,
    /// Bytes and operations per second of its fastest device, as measured or else as usual for one of its kind.
    usual_read: f32,
    usual_int8: f32,
    /// 1 if they were measured.
    measured: f32,
    /// 1 if it has a GPU, which may exchange data with those of other ranks.
    gpu: f32,
}

impl RankDevices {
    /// What these devices are, with the rates that were measured on some of them, by name, and the ranks that share some of them: each has
    /// its part of what is free, and of an accelerator's rates. The rates of a CPU are those of its own threads.
    pub(crate) fn of(
        devices: &Devices,
        measured: &[(String, Rates)],
        sharing: &[(String, usize)],
    ) -> RankDevices {
        let mut own = RankDevices { threads: devices.cpu().threads() as f32, ..RankDevices::default() };
        let mut free = Some(0);
        for backend in devices.backends() {
            let (device, known) =
                (backend.device(), measured.iter().find(|(name, _)| name == backend.name()));
            let is_cpu = device.kind == DeviceKind::Cpu;
            let sharing = sharing.iter().find(|(name, _)| name == backend.name());
            let sharing = sharing.map_or(1, |(_, ranks)| (*ranks).max(1));
            let part = if is_cpu { 1.0 } else { 1.0 / sharing as f64 };
            let read = match known {
                Some((_, rates)) => rates.read,
                None if is_cpu => 0.0,
                None => backend.nominal_rates().read,
            };
            own.read = own.read.max((part * read) as f32);
            let usual = known.map_or_else(|| backend.nominal_rates(), |(_, rates)| *rates);
            if (part * usual.read) as f32 > own.usual_read {
                (own.usual_read, own.usual_int8) = ((part * usual.read) as f32, (part * usual.int8) as f32);
                own.measured = if known.is_some() { 1.0 } else { 0.0 };
            }
            own.gpu = if device.kind == DeviceKind::Gpu { 1.0 } else { own.gpu };
            own.accelerated = if is_cpu { own.accelerated } else { 1.0 };
            free = free.zip(device.free_bytes).map(|(sum, free)| sum + free / sharing as u64);
        }
        own.free = free.unwrap_or(0) as f32;
        own
    }

    /// As a message to other ranks.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let RankDevices { threads, read, free, accelerated, usual_read, usual_int8, measured, gpu } = *self;
        let numbers: [f32; NUMBERS] =
            [threads, read, free, accelerated, usual_read, usual_int8, measured, gpu];
        numbers.iter().flat_map(|number| number.to_le_bytes()).collect()
    }

    /// Those of a rank's message.
    pub(crate) fn decode(message: &[u8]) -> RankDevices {
        let (numbers, _) = message.as_chunks::<4>();
        let number = |at: usize| numbers.get(at).copied().map_or(0.0, f32::from_le_bytes);
        RankDevices {
            threads: number(0),
            read: number(1),
            free: number(2),
            accelerated: number(3),
            usual_read: number(4),
            usual_int8: number(5),
            measured: number(6),
            gpu: number(7),
        }
    }
}

/// The speeds and the memory of ranks with these devices: bytes per second, if they are known of all of them, else the threads. Where
/// some have accelerators, CPUs that were not measured count as an ordinary one. Small differences are noise, and count as none.
pub(crate) fn resources_of(ranks: &[RankDevices]) -> Vec<RankResources> {
    let accelerated = ranks.iter().any(|rank| rank.accelerated > 0.0);
    let measured = accelerated || ranks.iter().all(|rank| rank.read > 0.0);
    let assumed = Rates::assumed(DeviceKind::Cpu).read;
    let speed = |rank: &RankDevices| match (measured, rank.read > 0.0) {
        (true, true) => f64::from(rank.read),
        (true, false) => assumed,
        (false, _) => f64::from(rank.threads.max(1.0)),
    };
    let speeds: Vec<f64> = ranks.iter().map(speed).collect();
    let (least, most) =
        (speeds.iter().copied().fold(f64::MAX, f64::min), speeds.iter().copied().fold(0.0, f64::max));
    let are_same = most < least * SAME_SPEED;
    let of = |(speed, rank): (f64, &RankDevices)| RankResources {
        speed: if are_same { 1.0 } else { speed },
        free: Some(rank.free as u64).filter(|free| *free > 0),
        rates: (rank.usual_read > 0.0 && rank.usual_int8 > 0.0).then(|| Rates {
            read: f64::from(rank.usual_read),
            int8: f64::from(rank.usual_int8),
            ..Rates::assumed(DeviceKind::Cpu)
        }),
    };
    speeds.into_iter().zip(ranks).map(of).collect()
}

/// The machines on which nothing was measured, where that may matter: there are several, or ranks that differ. `hosts` are those of the
/// ranks.
pub(crate) fn unmeasured<'h>(ranks: &[RankDevices], hosts: &[&'h str]) -> Vec<&'h str> {
    let kind = |rank: &RankDevices| [rank.threads, rank.measured, rank.accelerated];
    let differ = ranks.iter().any(|rank| ranks.first().map(kind) != Some(kind(rank)));
    let several = hosts.iter().any(|host| hosts.first() != Some(host));
    let mut found: Vec<&str> = Vec::new();
    for (rank, host) in ranks.iter().zip(hosts) {
        if rank.measured == 0.0 && (differ || several) && !found.contains(host) {
            found.push(host);
        }
    }
    found
}

/// That machines were not measured, in words: what ranks are taken for then.
pub(crate) fn unmeasured_text(ranks: &[RankDevices], hosts: &[&str]) -> Option<String> {
    let hosts = Some(unmeasured(ranks, hosts)).filter(|hosts| !hosts.is_empty())?;
    let by = match ranks.iter().any(|rank| rank.accelerated > 0.0) {
        true => "counts with the usual rates of its devices",
        false => "counts with its threads",
    };
    let hosts = hosts.join(", ");
    Some(format!(
        "nothing was measured on {hosts}, so each rank {by}; quadriga devices --measure, once on each machine, finds what they reach"
    ))
}

/// How GPUs exchange data where NCCL is asked for, and why not through it.
pub(crate) fn nccl_text(ranks: &[RankDevices], hosts: &[&str]) -> String {
    let without = ranks.iter().zip(hosts).enumerate().filter(|(_, (rank, _))| rank.gpu == 0.0);
    let without: Vec<String> =
        without.map(|(number, (_, host))| format!("rank {number} on {host}")).collect();
    let host = "the host exchanges data, which is copied to GPUs and back";
    match (without.len(), without.first()) {
        (_, None) => "GPUs exchange data through NCCL".to_owned(),
        (count, Some(_)) if count == ranks.len() => {
            "QUADRIGA_NCCL has no effect: no rank has a GPU".to_owned()
        }
        (1, Some(rank)) => format!("QUADRIGA_NCCL has no effect: {rank} has no GPU; {host}"),
        (count, Some(rank)) => {
            format!("QUADRIGA_NCCL has no effect: {rank} and {} of the others have no GPU; {host}", count - 1)
        }
    }
}

/// The names of a rank's accelerators, with what tells each apart from all others of its machine, if anything does.
pub(crate) fn identities(devices: &Devices) -> Vec<(String, Option<String>)> {
    devices.accelerators().iter().map(|one| (one.name().to_owned(), one.identity())).collect()
}

/// What a rank's accelerators are to others, as a message of one length.
pub(crate) fn accelerator_keys(host: &str, accelerators: &[(String, Option<String>)]) -> Vec<u8> {
    let keys = accelerators.iter().take(MOST_ACCELERATORS).map(|(_, identity)| key(host, identity));
    let mut message: Vec<u8> = keys.flatten().collect();
    message.resize(MOST_ACCELERATORS * KEY, 0);
    message
}

/// What an accelerator is to other processes: zeros for one that no other one has.
fn key(host: &str, identity: &Option<String>) -> [u8; KEY] {
    let Some(identity) = identity else { return [0; KEY] };
    let hash = Sha256::digest(format!("{host}\n{identity}"));
    hash.first_chunk().copied().unwrap_or_default()
}

/// How many ranks compute on each of these accelerators, by its name: those that have the same one, by the keys of all ranks.
pub(crate) fn sharing_of(
    accelerators: &[(String, Option<String>)],
    host: &str,
    keys_of_ranks: &[&[u8]],
) -> Vec<(String, usize)> {
    let ranks_with = |own: [u8; KEY]| {
        let has = |keys: &&&[u8]| keys.as_chunks::<KEY>().0.contains(&own);
        if own == [0; KEY] { 1 } else { keys_of_ranks.iter().filter(has).count().max(1) }
    };
    let shared =
        |(name, identity): &(String, Option<String>)| (name.clone(), ranks_with(key(host, identity)));
    accelerators.iter().map(shared).collect()
}

#[cfg(test)]
#[allow(clippy::panic, clippy::unwrap_used, clippy::indexing_slicing, reason = "tests")]
mod tests {
    use std::sync::Arc;

    use quadriga_runtime::Backend;

    use super::*;

    #[test]
    fn speeds_are_measured_on_all_ranks_or_counted_in_threads() {
        let cpu = |threads: f32, read: f32| RankDevices { threads, read, ..RankDevices::default() };
        let speeds = |ranks: &[RankDevices]| -> Vec<f64> {
            resources_of(ranks).iter().map(|rank| rank.speed).collect()
        };
        assert_eq!(speeds(&[cpu(8.0, 20e9), cpu(8.0, 22e9)]), [1.0, 1.0], "noise");
        let uneven = speeds(&[cpu(8.0, 40e9), cpu(8.0, 10e9)]);
        assert_eq!(uneven[0] / uneven[1], 4.0);
        assert_eq!(speeds(&[cpu(8.0, 40e9), cpu(2.0, 0.0)]), [8.0, 2.0], "one was not measured");
        assert_eq!(speeds(&[cpu(2.0, 0.0); 3]), [1.0; 3]);
        // A rank with an accelerator counts with that device's rates, and the others with those of an ordinary CPU.
        let gpu = RankDevices { threads: 2.0, read: 1e12, accelerated: 1.0, ..RankDevices::default() };
        assert_eq!(speeds(&[cpu(64.0, 0.0), gpu]), [20e9, f64::from(1e12f32)]);
    }

    #[test]
    fn a_rank_has_the_memory_of_its_devices_and_the_rates_of_the_fastest() {
        let accelerator: Arc<dyn Backend> = quadriga_sim::Sim::new("sim:0").capacity(1 << 30).build();
        let cpu = |threads| Arc::new(quadriga_cpu::Backend::builder().threads(threads).build().unwrap());
        let with = Devices::new([accelerator], cpu(1)).unwrap();
        let rates = |read| Rates { read, ..Rates::assumed(DeviceKind::Cpu) };
        let measured = [("cpu".to_owned(), rates(50e9)), ("sim:0".to_owned(), rates(900e9))];
        let own = RankDevices::of(&with, &measured, &[]);
        assert_eq!((own.threads, own.read, own.accelerated), (1.0, 900e9, 1.0));
        assert_eq!((own.usual_read, own.usual_int8), (900e9, 200e9), "those of the fastest device");
        assert_eq!(RankDevices::decode(&own.encode()), own);
        let known = resources_of(&[own, RankDevices::default()]);
        assert_eq!(known[0].rates.map(|rates| rates.int8), Some(f64::from(200e9f32)));
        assert!(known[1].rates.is_none());
        let without = Devices::new([], cpu(2)).unwrap();
        let host = RankDevices::of(&without, &measured, &[]);
        assert_eq!((host.threads, host.read, host.accelerated), (2.0, 50e9, 0.0));
        assert_eq!(RankDevices::of(&without, &[], &[]).read, 0.0, "nothing was measured");
        // Ranks of one machine share its memory, but for that of accelerators.
        let half = RankDevices::of(&without, &measured, &[("cpu".to_owned(), 2)]);
        assert!(half.free < 0.7 * host.free && half.free > 0.3 * host.free, "{half:?} {host:?}");
        assert!(own.free > host.free * 0.5 + (1u64 << 29) as f32, "{own:?} {host:?}");
        // Two ranks on one accelerator have half of it each, and half of its speed.
        let shared = RankDevices::of(&with, &measured, &[("sim:0".to_owned(), 2)]);
        assert_eq!((shared.read, shared.usual_int8), (450e9, 100e9));
        assert!((own.free - shared.free - (1u64 << 29) as f32).abs() < 0.2 * host.free, "{own:?} {shared:?}");
    }

    #[test]
    fn machines_without_measured_rates_are_named_where_that_matters() {
        let rank = |threads: f32, measured: f32| RankDevices { threads, measured, ..RankDevices::default() };
        assert!(unmeasured(&[rank(2.0, 0.0); 2], &["a", "a"]).is_empty(), "ranks that are alike");
        assert!(unmeasured(&[rank(2.0, 1.0); 2], &["a", "b"]).is_empty());
        assert_eq!(unmeasured(&[rank(2.0, 0.0); 3], &["a", "b", "a"]), ["a", "b"]);
        assert_eq!(unmeasured(&[rank(2.0, 1.0), rank(2.0, 0.0)], &["a", "b"]), ["b"]);
        assert_eq!(unmeasured(&[rank(2.0, 0.0), rank(4.0, 0.0)], &["a", "a"]), ["a"]);
        let text = |ranks: &[RankDevices]| unmeasured_text(ranks, &["a", "b"]).unwrap();
        assert!(text(&[rank(2.0, 0.0); 2]).contains("on a, b, so each rank counts with its threads"));
        let gpu = RankDevices { accelerated: 1.0, ..rank(2.0, 0.0) };
        assert!(text(&[rank(2.0, 1.0), gpu]).contains("on b, so each rank counts with the usual rates"));
    }

    #[test]
    fn nccl_is_said_to_be_used_or_why_not() {
        let rank = |gpu: f32| RankDevices { gpu, ..RankDevices::default() };
        let text = |gpus: &[f32]| {
            let ranks: Vec<RankDevices> = gpus.iter().map(|gpu| rank(*gpu)).collect();
            nccl_text(&ranks, &["a", "b", "c"][..ranks.len()])
        };
        assert_eq!(text(&[1.0, 1.0]), "GPUs exchange data through NCCL");
        assert!(text(&[1.0, 0.0]).contains("no effect: rank 1 on b has no GPU; the host exchanges data"));
        assert!(text(&[0.0, 1.0, 0.0]).contains("rank 0 on a and 1 of the others have no GPU"));
        assert!(text(&[0.0, 0.0]).ends_with("no rank has a GPU"));
    }

    #[test]
    fn ranks_share_what_is_one_device_of_one_machine() {
        let rank = |host: &'static str, gpus: &[&str]| {
            let named = gpus.iter().enumerate();
            let named = named
                .map(|(n, id)| (format!("cuda:{n}"), Some((*id).to_owned()).filter(|id| !id.is_empty())));
            (host, named.collect::<Vec<_>>())
        };
        // The second process sees the second GPU of the first under another number, the third has a device of its own in software, and
        // the last one is on another machine.
        let ranks = [rank("a", &["one", "two"]), rank("a", &["two"]), rank("a", &[""]), rank("b", &["two"])];
        let keys: Vec<Vec<u8>> = ranks.iter().map(|(host, gpus)| accelerator_keys(host, gpus)).collect();
        assert!(keys.iter().all(|key| key.len() == keys[0].len()));
        let keys: Vec<&[u8]> = keys.iter().map(Vec::as_slice).collect();
        let counts = |rank: usize| -> Vec<usize> {
            let (host, gpus) = &ranks[rank];
            sharing_of(gpus, host, &keys).into_iter().map(|(_, count)| count).collect()
        };
        assert_eq!((counts(0), counts(1), counts(2), counts(3)), (vec![1, 2], vec![2], vec![1], vec![1]));
    }
}
