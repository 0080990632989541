//! Accelerators of one process that divide every layer of a model: each is a rank with a thread of its own.

use std::sync::Arc;
use std::thread;

use quadriga_cluster::{Communicator, Limits, in_process};

use crate::engine::{Engine, EngineOptions};
use crate::model::Model;
use crate::placement::{CpuOptions, Devices, PlacedModel, Placement};
use crate::ranks::Parallelism;
use crate::serving::{Batcher, BatcherOptions};
use crate::{Error, Result};

/// One of several accelerators, with its part of a model.
pub struct DeviceRank {
    /// The rank's part.
    pub model: Model,
    /// Its accelerator, and a CPU backend of its own: ranks wait for each other there.
    pub devices: Devices,
    /// Where its part is.
    pub placed: PlacedModel,
    /// The engine's options, the same for all ranks.
    pub options: EngineOptions,
}

impl Placement {
    /// Divides a model among accelerators: heads, feed-forward columns, experts and vocabulary rows of every layer, in proportion to
    /// [`Placement::tensor_split`] or else to the accelerators' rates. Those without a share are left out.
    ///
    /// The first rank is used as if it were alone, once the others [follow](DeviceRank::follow) it: until then, an engine of it is an
    /// error.
    ///
    /// # Errors
    /// There are fewer than two accelerators with a share, the model is [a rank's part](Model::with_ranks) already, the model cannot be divided, or a part cannot be planned.
    pub fn plan_device_ranks(
        &self,
        model: &Model,
        devices: &Devices,
        cpu: CpuOptions,
        options: &EngineOptions,
    ) -> Result<Vec<DeviceRank>> {
        if model.ranks().is_some() {
            let reason =
                "a part of a model that ranks have divided cannot be divided among several GPUs of a rank";
            return Err(Error::Ranks { reason: reason.to_owned() });
        }
        let shares = self.shares(model, devices);
        let used = devices.accelerators().iter().zip(shares).filter(|(_, share)| *share > 0.0);
        let (accelerators, speeds): (Vec<_>, Vec<f64>) = used.unzip();
        if accelerators.len() < 2 {
            return Err(Error::Ranks { reason: "rows are divided among two GPUs or more".to_owned() });
        }
        let all = devices.cpu().threads();
        let cpu = CpuOptions { threads: Some((all / accelerators.len()).max(1)), ..cpu };
        let mut ranks = Vec::new();
        for (rank, accelerator) in
            in_process(accelerators.len(), Limits::default()).into_iter().zip(accelerators)
        {
            let communicator: Arc<dyn Communicator> = Arc::new(rank);
            let parallelism = Parallelism { cache: Some(options.cache_rows(model)?), ..Parallelism::TENSOR };
            let part = model.clone().with_uneven_ranks(communicator, parallelism, &speeds)?;
            ranks.push((part, Devices::new([Arc::clone(accelerator)], cpu.open(true)?)?));
        }
        let placement = Placement { tensor_split: Vec::new(), ..self.clone() };
        let mut planned = placement.plan_all(&ranks, options)?;
        // What the smallest has room for is for all.
        let least = |of: fn(&EngineOptions) -> usize| planned.iter().map(|(_, options)| of(options)).min();
        let (context, batch) = (least(|options| options.context), least(|options| options.batch));
        if planned.iter().any(|(_, own)| Some(own.context) != context || Some(own.batch) != batch) {
            let agreed = EngineOptions {
                context: context.unwrap_or(options.context),
                batch: batch.unwrap_or(options.batch),
                ..options.clone()
            };
            planned = Placement { streaming_batch: 0, ..placement }.plan_all(&ranks, &agreed)?;
        }
        if let Some(first) = ranks.first().and_then(|(first, _)| first.ranks()) {
            first.expect_followers(ranks.len().saturating_sub(1));
        }
        let joined = ranks.into_iter().zip(planned);
        Ok(joined
            .map(|((model, devices), (placed, options))| DeviceRank { model, devices, placed, options })
            .collect())
    }

    fn plan_all(
        &self,
        ranks: &[(Model, Devices)],
        options: &EngineOptions,
    ) -> Result<Vec<(PlacedModel, EngineOptions)>> {
        ranks.iter().map(|(part, devices)| self.plan_with_context(part, devices, options)).collect()
    }
}

impl DeviceRank {
    /// This rank's part in words.
    pub fn describe(&self) -> String {
        let name = self.devices.accelerators().first().map_or("cpu", |accelerator| accelerator.name());
        let part = self.model.ranks().map(|share| share.describe()).unwrap_or_default();
        format!("{name} has {part}")
    }

    /// Computes what the [`Engine`] or, with options, [`Batcher`] of the first rank's part computes, on a thread of its own, until
    /// that is dropped, which waits for the thread. An error ends the first rank's next call.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub fn follow(self, first: &Model, batcher: Option<BatcherOptions>) -> Result<()> {
        let name = format!("rank of {}", self.devices.accelerators().first().map_or("cpu", |of| of.name()));
        let communicator = self.model.ranks().map(|ranks| Arc::clone(ranks.communicator()));
        let reason = communicator.clone();
        let run = move || {
            let DeviceRank { model, placed, options, .. } = self;
            let followed = match batcher {
                None => Engine::new(model, &placed.scheduler, options, &mut |_| {})
                    .and_then(|mut engine| engine.follow()),
                Some(batcher) => Batcher::new(
                    model,
                    &placed.scheduler,
                    BatcherOptions { engine: options, ..batcher },
                    &mut |_| {},
                )
                .and_then(|mut batcher| batcher.follow_ranks()),
            };
            if let (Err(error), Some(communicator)) = (followed, communicator) {
                communicator.fail(&error.to_string());
            }
        };
        match thread::Builder::new().name(name).spawn(run) {
            Ok(thread) => {
                first.ranks().inspect(|ranks| ranks.add_follower(thread));
                Ok(())
            }
            Err(error) => {
                let message = format!("a thread cannot be started: {error}");
                reason.inspect(|communicator| communicator.fail(&message));
                Err(Error::Ranks { reason: message })
            }
        }
    }
}
