//! Evaluation cases, to be compared with exact results by [`judge`](crate::judge).
//!
//! A case is one JSON object a line:
//!
//! | kind | input | result |
//! |---|---|---|
//! | `tokenize` | `text`, `special` | `tokens` |
//! | `greedy` | `text`, `special`, `n` (48) | `tokens` of the prompt, `greedy` ids, `top5` of each step |
//! | `next` | `text` | `top5` for the token after the text |
//! | `nll` | `text`, `ctx` | `nll`, `chunk_nll`, `count` |
//!
//! Log-probabilities are natural logarithms, over the whole vocabulary. No beginning-of-text token is added.

use serde::{Deserialize, Serialize};

use crate::sampling::{log_probability, top_log_probabilities};
use crate::{BatchToken, Engine, Error, Result};

/// A case; result fields in the input are ignored.
#[derive(Clone, Debug, Deserialize)]
pub struct EvalCase {
    /// The name, which the result has too.
    pub name: String,
    /// The kind of result.
    pub kind: CaseKind,
    /// The text.
    pub text: String,
    /// Whether special tokens in the text are parsed.
    #[serde(default)]
    pub special: bool,
    /// The largest number of tokens of a greedy continuation.
    #[serde(default = "greedy_length")]
    pub n: usize,
    /// The number of tokens of a chunk, for the negative log-likelihood.
    #[serde(default)]
    pub ctx: usize,
}

fn greedy_length() -> usize {
    48
}

/// The kind of a case.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum CaseKind {
    /// The tokens of a text.
    Tokenize,
    /// A greedy continuation.
    Greedy,
    /// The most probable next tokens.
    Next,
    /// The mean negative log-likelihood of a text.
    Nll,
}

/// A token with its log-probability.
pub type Scored = (u32, f64);

/// The result of a case.
#[derive(Clone, Debug, Serialize)]
pub struct CaseResult {
    /// The case's name.
    pub name: String,
    /// The case's kind.
    pub kind: CaseKind,
    /// The result fields.
    #[serde(flatten)]
    pub result: ResultFields,
}

/// The result fields of each kind.
#[derive(Clone, Debug, Serialize)]
#[serde(untagged)]
pub enum ResultFields {
    /// Of `tokenize`.
    Tokenize {
        /// The tokens.
        tokens: Vec<u32>,
    },
    /// Of `greedy`.
    Greedy {
        /// The prompt's tokens.
        tokens: Vec<u32>,
        /// The continuation, including the end-of-generation token if there is one.
        greedy: Vec<u32>,
        /// The five most probable tokens of each step.
        top5: Vec<Vec<Scored>>,
    },
    /// Of `next`.
    Next {
        /// The five most probable tokens.
        top5: Vec<Scored>,
    },
    /// Of `nll`.
    Nll {
        /// The mean over all chunks.
        nll: f64,
        /// The mean of each chunk.
        chunk_nll: Vec<f64>,
        /// The number of predicted tokens.
        count: usize,
    },
}

/// Evaluates one case on an engine, from an empty sequence 0.
pub fn evaluate(engine: &mut Engine, case: &EvalCase) -> Result<CaseResult> {
    let tokens = engine.model().tokenizer()?.encode(&case.text, case.special);
    engine.truncate(0, 0);
    let result = match case.kind {
        CaseKind::Tokenize => ResultFields::Tokenize { tokens },
        CaseKind::Greedy => greedy(engine, tokens, case.n)?,
        CaseKind::Next => {
            if tokens.is_empty() {
                return Err(Error::EmptyPrompt);
            }
            engine.feed(&tokens)?;
            ResultFields::Next { top5: top_log_probabilities(engine.logits(0), 5)? }
        }
        CaseKind::Nll => likelihood(engine, &tokens, case.ctx)?,
    };
    Ok(CaseResult { name: case.name.clone(), kind: case.kind, result })
}

fn greedy(engine: &mut Engine, tokens: Vec<u32>, max_tokens: usize) -> Result<ResultFields> {
    if tokens.is_empty() {
        return Err(Error::EmptyPrompt);
    }
    engine.feed(&tokens)?;
    let (mut greedy, mut steps) = (Vec::new(), Vec::new());
    while greedy.len() < max_tokens {
        let top5 = top_log_probabilities(engine.logits(0), 5)?;
        let Some((best, _)) = top5.first().copied() else { break };
        greedy.push(best);
        steps.push(top5);
        if engine.model().tokenizer()?.is_end(best) || greedy.len() == max_tokens {
            break;
        }
        engine.feed(&[best])?;
    }
    Ok(ResultFields::Greedy { tokens, greedy, top5: steps })
}

fn likelihood(engine: &mut Engine, tokens: &[u32], chunk: usize) -> Result<ResultFields> {
    if chunk < 2 {
        return Err(Error::Option { name: "ctx", value: chunk.to_string(), wanted: "at least 2" });
    }
    if tokens.len() < chunk {
        let wanted = "at most the number of tokens in the text";
        return Err(Error::Option { name: "ctx", value: chunk.to_string(), wanted });
    }
    let mut chunk_nll = Vec::new();
    let mut count = 0;
    for part in tokens.chunks_exact(chunk) {
        engine.truncate(0, 0);
        let (predicting, predicted) =
            (part.get(..chunk - 1).unwrap_or_default(), part.get(1..).unwrap_or_default());
        let at_once = engine.options().batch.max(1);
        let mut sum = 0.0;
        // The logits of a whole chunk can be larger than the model.
        for (tokens, next) in predicting.chunks(at_once).zip(predicted.chunks(at_once)) {
            let output = |token: &u32| BatchToken { sequence: 0, token: *token, output: true };
            engine.extend(&tokens.iter().map(output).collect::<Vec<_>>())?;
            for (row, next) in next.iter().enumerate() {
                sum -= log_probability(engine.logits(row), *next)?;
            }
        }
        count += chunk - 1;
        chunk_nll.push(sum / (chunk - 1) as f64);
    }
    let nll = chunk_nll.iter().sum::<f64>() / chunk_nll.len().max(1) as f64;
    Ok(ResultFields::Nll { nll, chunk_nll, count })
}
