//! From a [`Generation`] to answers: what every dialect asks of a model.

use std::sync::Arc;

use quadriga_llm::constraint::Cancellation;
use quadriga_llm::serving::Request;

use crate::error::ApiError;
use crate::generation::Generation;
use crate::held_answers;
use crate::model::ServedModel;
use crate::operation::caller::Caller;
use crate::prompt::{self, Rendered};
use crate::running::Running;

/// Ends the compiling of grammars when it is dropped: nobody waits for them any more.
#[derive(Default)]
struct CancelOnDrop(Cancellation);

impl Drop for CancelOnDrop {
    fn drop(&mut self) {
        self.0.cancel();
    }
}

impl ServedModel {
    /// Starts to answer a request. When it returns, the request was checked and accepted.
    pub async fn generate(
        self: &Arc<Self>,
        generation: Generation,
        caller: &Caller,
    ) -> Result<Running, ApiError> {
        self.generate_all(vec![generation], caller).await
    }

    /// Starts to answer several requests as one: their choices are numbered one after another.
    pub async fn generate_all(
        self: &Arc<Self>,
        generations: Vec<Generation>,
        caller: &Caller,
    ) -> Result<Running, ApiError> {
        // An encoder has no chat template either, which would be the next error.
        self.service()?;
        let usage = caller.enter()?;
        prompt::check_answers(self, &generations)?;
        let bytes = generations.iter().map(|generation| generation.prompt.bytes()).sum();
        let served = Arc::clone(self);
        let client = caller.client();
        // Dropped with this function's future, when the client leaves.
        let until_dropped = CancelOnDrop::default();
        let cancellation = until_dropped.0.clone();
        let memory = usage.answer_memory().clone();
        let render = move || {
            let rendered = generations.into_iter().map(|generation| prompt::rendered(&served, generation));
            let rendered = rendered.collect::<Result<Vec<Rendered>, ApiError>>()?;
            let prompts = rendered.iter().map(Rendered::generation);
            let room = held_answers::reserve(&memory, served.context(), prompts)?;
            let known = rendered.iter().map(|rendered| rendered.known(&served, client));
            let known = known.collect::<Result<Option<Vec<_>>, ApiError>>()?;
            Ok::<_, ApiError>((room, known.ok_or((served, rendered))))
        };
        let (room, prepared) = self.tokenizing(bytes, render).await??;
        let prepared = match prepared {
            Ok(prepared) => prepared,
            Err((served, rendered)) => {
                let compile = move || {
                    let compiled = rendered.iter().map(|one| one.compiled(&served, client, &cancellation));
                    compiled.collect::<Result<Vec<_>, ApiError>>()
                };
                self.compiling(compile).await??
            }
        };
        Running::start(self, prepared, usage, room).await
    }

    /// The engine's requests, one for each choice, for callers that give them to [`ServedModel::service`] themselves.
    ///
    /// # Errors
    /// A field is wrong, or the prompt does not fit.
    pub fn prepare(&self, generation: Generation) -> Result<Vec<Request>, ApiError> {
        Ok(prompt::rendered(self, generation)?.compiled(self, 0, &Cancellation::default())?.requests)
    }

    /// The tokens of a prompt, rendered and tokenized as [`generate`](Self::generate) does, without any generation.
    pub async fn tokens(self: &Arc<Self>, generation: Generation) -> Result<Vec<u32>, ApiError> {
        let (served, bytes) = (Arc::clone(self), generation.prompt.bytes());
        self.counting(bytes, move || prompt::tokens(&served, generation)).await?
    }

    /// The text of a conversation as the model's chat template renders it.
    pub async fn rendered(self: &Arc<Self>, generation: Generation) -> Result<String, ApiError> {
        let (served, bytes) = (Arc::clone(self), generation.prompt.bytes());
        self.tokenizing(bytes, move || prompt::text(&served, generation)).await?
    }
}
