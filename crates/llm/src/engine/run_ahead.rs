//! Device-side argmax and run-ahead decoding.
//!
//! A greedy engine's graphs end in the argmax of the logits, so that a few bytes are copied to the host in place of the
//! logits. In run-ahead decoding the device also uses the argmax as the next step's token, and starts that step before
//! the host knows the token.

use std::sync::Arc;

use quadriga_graph::TensorId;
use quadriga_runtime::{Backend, Plan};

use super::{BatchToken, Engine, row_of};
use crate::models::GraphShape;
use crate::{Error, LogitsError, Result, sampling};

/// The state of greedy decoding, and the argmax of every output row that has been read.
#[derive(Default)]
pub(super) struct Decode {
    state: DecodeState,
    argmax: Vec<Result<u32, LogitsError>>,
    /// Bytes as they come from the device; kept to reuse the memory.
    buffer: Vec<u8>,
}

#[derive(Clone, Copy, Default)]
enum DecodeState {
    /// All results have been read, and no batch is in flight.
    #[default]
    Idle,
    /// A batch is in flight, whose last `rows` results have not been read. `step` is set if it is a decode step, which
    /// another one can follow ahead of the host.
    InFlight { rows: usize, step: Option<DecodeStep> },
    /// All results have been read, and the next decode step, with the argmax of the previous one as its token, is in
    /// flight. Its token is not part of the sequence before it is fed.
    RunAhead { step: DecodeStep },
}

/// A batch of a single token whose logits are an output.
#[derive(Clone, Copy)]
struct DecodeStep {
    token: BatchToken,
    shape: GraphShape,
}

impl Decode {
    /// Forgets results and batches in flight.
    pub(super) fn reset(&mut self) {
        self.argmax.clear();
        self.state = DecodeState::Idle;
    }

    /// Notes that a batch has been started.
    pub(super) fn start(&mut self, batch: &[BatchToken], shape: GraphShape) {
        let step = match batch {
            [token] if token.output => Some(DecodeStep { token: *token, shape }),
            _ => None,
        };
        self.state = match shape.rows {
            0 => DecodeState::Idle,
            rows => DecodeState::InFlight { rows, step },
        };
    }

    /// Discards a step that ran ahead, and prevents that one follows the batch in flight.
    pub(super) fn discard_run_ahead(&mut self) {
        self.state = match self.state {
            DecodeState::InFlight { rows, .. } => DecodeState::InFlight { rows, step: None },
            DecodeState::Idle | DecodeState::RunAhead { .. } => DecodeState::Idle,
        };
    }
}

/// Whether the logits of a plan are in host memory.
pub(crate) fn has_logits_on_host(plan: &Plan) -> bool {
    let logits = plan.graph().outputs().iter().find(|(name, _)| name == "logits");
    let storage = |id: TensorId| plan.graph().get(id).map(|tensor| tensor.storage());
    let number = logits.and_then(|(_, id)| plan.placement(storage(*id)?));
    let backend: Option<&Arc<dyn Backend>> = number.and_then(|number| plan.backends().get(number));
    backend.is_none_or(|backend| backend.memory().host)
}

impl Engine {
    /// The most probable token in output row `row`, of equals the smallest, as a greedy sampler takes it. With
    /// [`EngineOptions::greedy`](super::EngineOptions::greedy) the device computed it; otherwise it is found in the
    /// logits here.
    ///
    /// # Errors
    /// The logits are not finite, the row does not exist, or the batch has not been [waited](Engine::wait) for.
    pub fn argmax(&self, row: usize) -> Result<u32> {
        if !self.options.greedy {
            return sampling::argmax(self.logits(row));
        }
        if let DecodeState::InFlight { .. } = self.decode.state {
            return Err(Error::BatchInFlight);
        }
        match self.decode.argmax.get(row) {
            Some(argmax) => Ok((*argmax)?),
            None => Err(LogitsError::Empty.into()),
        }
    }

    /// Changes [`EngineOptions::greedy`](super::EngineOptions::greedy) for all batches from now on; the results of earlier ones are gone. It stays
    /// false where the logits are in host memory anyway.
    ///
    /// # Errors
    /// A batch in flight fails; its tokens are not part of their sequences then.
    pub fn set_greedy(&mut self, greedy: bool) -> Result<()> {
        self.wait()?;
        self.decode.reset();
        self.logits.clear();
        let greedy = greedy && self.options.logits;
        if greedy && self.argmax_on_device.is_none() {
            self.argmax_on_device = Some(self.can_compute_argmax());
        }
        self.options.greedy = greedy && self.argmax_on_device == Some(true);
        Ok(())
    }

    /// Whether a device has the logits. Where the graph with an argmax cannot be prepared, the one without is used.
    fn can_compute_argmax(&mut self) -> bool {
        let is_host = |plan: &Plan| plan.backends().iter().all(|backend| backend.memory().host);
        if self.session.plan().is_none_or(is_host) {
            return false;
        }
        let shape = GraphShape { argmax: true, ..self.options.shape(&self.model, 1, 1, 1) };
        let prepared = self.prepare(shape, &mut |_| {});
        prepared.is_ok() && !self.session.plan().is_none_or(has_logits_on_host)
    }

    /// Waits for the batch in flight, and reads its results.
    pub fn wait(&mut self) -> Result<()> {
        self.read_argmax(false)
    }

    /// As [`Engine::wait`]; but where the batch is a single token and the device is asynchronous, it starts the next
    /// step with the argmax as its token before the host reads it. If that token is [fed](Engine::feed) next, its step
    /// is in flight already; anything else discards it.
    ///
    /// ```no_run
    /// # fn example(engine: &mut quadriga_llm::Engine) -> Result<(), quadriga_llm::Error> {
    /// // Greedy decoding, with `EngineOptions::greedy` set and the prompt fed:
    /// for _ in 0..100 {
    ///     engine.run_ahead()?;
    ///     let token = engine.argmax(0)?;
    ///     engine.feed(&[token])?;
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub fn run_ahead(&mut self) -> Result<()> {
        self.read_argmax(true)
    }

    /// If the tokens are those of the step that ran ahead, makes it the batch in flight. Discards it otherwise.
    pub(super) fn adopt_run_ahead(&mut self, tokens: &[BatchToken]) -> bool {
        let DecodeState::RunAhead { step } = self.decode.state else { return false };
        self.decode.state = DecodeState::Idle;
        if tokens != [step.token] {
            return false;
        }
        self.sequences.begin();
        self.sequences.append(step.token.sequence, step.token.token);
        self.decode.argmax.clear();
        self.decode.state = DecodeState::InFlight { rows: 1, step: Some(step) };
        true
    }

    /// Reads the results of the batch in flight, if there is one; starts the next step first where `ahead` allows it.
    fn read_argmax(&mut self, ahead: bool) -> Result<()> {
        let DecodeState::InFlight { rows, step } = self.decode.state else { return Ok(()) };
        match self.try_read_argmax(rows, step, ahead) {
            Ok(state) => {
                self.decode.state = state;
                Ok(())
            }
            Err(error) => {
                self.roll_back();
                self.decode.reset();
                Err(error)
            }
        }
    }

    fn try_read_argmax(&mut self, rows: usize, step: Option<DecodeStep>, ahead: bool) -> Result<DecodeState> {
        let next = match step {
            Some(step) if ahead && self.prepare_run_ahead(step)? => Some(step),
            _ => None,
        };
        // The inputs of the next step are set by now, so that one transfer can bring them and the results.
        let read = self.session.read_async(&["argmax", "sum"])?;
        if next.is_some() {
            self.session.start()?;
        }
        self.decode.buffer.resize(rows * 8, 0);
        self.session.finish_read(read, &mut self.decode.buffer)?;
        let (numbers, _) = self.decode.buffer.as_chunks::<4>();
        let (tokens, sums) = numbers.split_at(numbers.len() / 2);
        let tokens = tokens.iter().map(|token| u32::from_ne_bytes(*token));
        // The sum of a row is finite only if every logit is.
        let vocabulary = self.model.hyperparameters().vocabulary;
        let finite = sums.iter().all(|sum| f32::from_ne_bytes(*sum).is_finite())
            && tokens.clone().all(|token| (token as usize) < vocabulary);
        if !finite {
            self.read_logits(rows, next)?;
            return Ok(DecodeState::Idle);
        }
        let last = tokens.clone().next_back();
        self.decode.argmax.extend(tokens.map(Ok));
        Ok(match next.zip(last) {
            Some((DecodeStep { token, shape }, last)) => {
                let step = DecodeStep { token: BatchToken { token: last, ..token }, shape };
                DecodeState::RunAhead { step }
            }
            None => DecodeState::Idle,
        })
    }

    /// Chains the argmax of a step to the token of the next one and sets the other inputs, if a step can follow it
    /// ahead of the host: same graph, room in the context and in the windows, an asynchronous session and nobody who needs other results.
    fn prepare_run_ahead(&mut self, DecodeStep { token, shape }: DecodeStep) -> Result<bool> {
        let len = self.len(token.sequence);
        let room = len < self.options.context && self.windows.fits(token.sequence, len, 1);
        if !room
            || self.options.hidden
            || self.observer.is_some()
            || !self.session.plan().is_some_and(Plan::is_asynchronous)
        {
            return Ok(false);
        }
        let visible = self.fill(&[token])?;
        self.sequences.pop(token.sequence); // Appended when it is fed.
        if self.options.shape(&self.model, 1, 1, visible.end) != shape
            || !self.session.chain("argmax", "tokens")?
        {
            return Ok(false);
        }
        self.set_positions()?;
        Ok(true)
    }

    /// Reads the logits of the batch in flight and finds each row's argmax or error here, as a sampler would. If a step
    /// ran ahead of the batch, the batch is computed again: its logits have been overwritten.
    fn read_logits(&mut self, rows: usize, overwritten: Option<DecodeStep>) -> Result<()> {
        if let Some(step) = overwritten {
            self.sequences.pop(step.token.sequence);
            self.run(&[step.token])?;
        }
        let vocabulary = self.model.hyperparameters().vocabulary;
        let mut logits = vec![0.0; rows * vocabulary];
        self.session.read_into("logits", &mut logits)?;
        let argmax = (0..rows).map(|row| sampling::find_argmax(row_of(&logits, vocabulary, row)));
        self.decode.argmax.extend(argmax);
        Ok(())
    }
}
