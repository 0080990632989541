//! Cases with known results, for judging an engine: what `quadriga eval` computes.
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
//! Log-probabilities are natural, over the whole vocabulary. No beginning-of-text token is added.

use serde::{Deserialize, Serialize};

use crate::sampling::{log_probability, top_log_probabilities};
use crate::{BatchToken, Engine, Error, Result};

/// One case; result fields in the input are ignored.
#[derive(Clone, Debug, Deserialize)]
pub struct Case {
    /// What the result is called.
    pub name: String,
    /// What is asked.
    pub kind: Kind,
    /// The text.
    pub text: String,
    /// Whether special tokens in the text are parsed.
    #[serde(default)]
    pub special: bool,
    /// The most tokens of a greedy continuation.
    #[serde(default = "greedy_length")]
    pub n: usize,
    /// Tokens of a chunk.
    #[serde(default)]
    pub ctx: usize,
}

fn greedy_length() -> usize {
    48
}

/// What a case asks.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// The tokens of a text.
    Tokenize,
    /// A greedy continuation.
    Greedy,
    /// The next token.
    Next,
    /// The mean negative log-likelihood of a text.
    Nll,
}

/// A token with its log-probability.
pub type Scored = (u32, f64);

/// The result of a case.
#[derive(Clone, Debug, Serialize)]
pub struct Outcome {
    /// The case's name.
    pub name: String,
    /// The case's kind.
    pub kind: Kind,
    /// What was asked.
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
        /// The continuation, with the end token if it came.
        greedy: Vec<u32>,
        /// The five best tokens at each step.
        top5: Vec<Vec<Scored>>,
    },
    /// Of `next`.
    Next {
        /// The five best tokens.
        top5: Vec<Scored>,
    },
    /// Of `nll`.
    Nll {
        /// The mean over chunks.
        nll: f64,
        /// Each chunk's mean.
        chunk_nll: Vec<f64>,
        /// How many tokens were predicted.
        count: usize,
    },
}

/// Evaluates one case on an engine, from an empty sequence 0.
pub fn evaluate(engine: &mut Engine, case: &Case) -> Result<Outcome> {
    let tokens = engine.model().tokenizer()?.encode(&case.text, case.special);
    engine.truncate(0, 0);
    let result = match case.kind {
        Kind::Tokenize => ResultFields::Tokenize { tokens },
        Kind::Greedy => greedy(engine, tokens, case.n)?,
        Kind::Next => {
            if tokens.is_empty() {
                return Err(Error::EmptyPrompt);
            }
            engine.feed(&tokens)?;
            ResultFields::Next { top5: top_log_probabilities(engine.logits(0), 5)? }
        }
        Kind::Nll => likelihood(engine, &tokens, case.ctx)?,
    };
    Ok(Outcome { name: case.name.clone(), kind: case.kind, result })
}

fn greedy(engine: &mut Engine, tokens: Vec<u32>, most: usize) -> Result<ResultFields> {
    if tokens.is_empty() {
        return Err(Error::EmptyPrompt);
    }
    engine.feed(&tokens)?;
    let (mut greedy, mut steps) = (Vec::new(), Vec::new());
    while greedy.len() < most {
        let top5 = top_log_probabilities(engine.logits(0), 5)?;
        let Some((best, _)) = top5.first().copied() else { break };
        greedy.push(best);
        steps.push(top5);
        if engine.model().tokenizer()?.is_end(best) || greedy.len() == most {
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
    let mut chunk_nll = Vec::new();
    let mut count = 0;
    for part in tokens.chunks_exact(chunk) {
        engine.truncate(0, 0);
        let entries: Vec<BatchToken> =
            part.iter().map(|token| BatchToken { sequence: 0, token: *token, output: true }).collect();
        engine.extend(&entries)?;
        let mut sum = 0.0;
        for (row, next) in part.iter().skip(1).enumerate() {
            sum -= log_probability(engine.logits(row), *next)?;
        }
        count += chunk - 1;
        chunk_nll.push(sum / (chunk - 1) as f64);
    }
    let nll = chunk_nll.iter().sum::<f64>() / chunk_nll.len().max(1) as f64;
    Ok(ResultFields::Nll { nll, chunk_nll, count })
}
