//! The output of `quadriga embed`. Numbers are written in the shortest form that is read back as the same f32.

use std::io::Write;

use quadriga_llm::{Pooling, cosine};
use serde::Serialize;

use crate::failure::Outcome;

/// llama.cpp's formats of embeddings.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum OutputFormat {
    /// The vectors alone
    Array,
    /// As OpenAI's service has it
    Json,
}

/// A text and its score.
#[derive(Serialize)]
pub(super) struct Ranked<'t> {
    pub(super) text: &'t str,
    /// The position among the texts, from 0.
    pub(super) index: usize,
    pub(super) score: f32,
}

#[derive(Serialize)]
pub(super) struct Ranking<'t> {
    model: &'t str,
    query: &'t str,
    ranking: &'t [Ranked<'t>],
}

/// The ranking of texts by a query.
pub(super) fn ranking<'t>(model: &'t str, query: &'t str, ranking: &'t [Ranked<'t>]) -> Ranking<'t> {
    Ranking { model, query, ranking }
}

/// What all embeddings have in common.
pub(super) struct Embedded<'t> {
    pub(super) model: &'t str,
    pub(super) pooling: Pooling,
    pub(super) width: usize,
}

/// A text, the number of its tokens and its vector, or those of its tokens.
type Row<'t> = (&'t str, usize, &'t [f32]);

/// One vector, or one for each token.
#[derive(Serialize)]
#[serde(untagged)]
enum Vectors<'t> {
    One(&'t [f32]),
    Many(Vec<&'t [f32]>),
}

#[derive(Serialize)]
struct TextEmbedding<'t> {
    text: &'t str,
    tokens: usize,
    embedding: Vectors<'t>,
}

#[derive(Serialize)]
struct Embeddings<'t> {
    model: &'t str,
    pooling: &'static str,
    embeddings: Vec<TextEmbedding<'t>>,
}

#[derive(Serialize)]
struct Similarity<'t> {
    model: &'t str,
    pooling: &'static str,
    texts: Vec<&'t str>,
    similarity: Vec<Vec<f32>>,
}

#[derive(Serialize)]
struct ListEntry<'t> {
    object: &'static str,
    index: usize,
    embedding: Vectors<'t>,
}

#[derive(Serialize)]
struct List<'t> {
    object: &'static str,
    data: Vec<ListEntry<'t>>,
}

impl Embedded<'_> {
    fn vectors<'v>(&self, vector: &'v [f32]) -> Vectors<'v> {
        match self.pooling {
            Pooling::None => Vectors::Many(vector.chunks(self.width.max(1)).collect()),
            _ => Vectors::One(vector),
        }
    }

    /// Writes the embeddings.
    pub(super) fn write(
        &self,
        rows: &[Row<'_>],
        format: Option<OutputFormat>,
        out: &mut dyn Write,
    ) -> Outcome {
        let all = rows.iter().map(|(.., vector)| self.vectors(vector));
        match format {
            Some(OutputFormat::Array) => serde_json::to_writer(out, &all.collect::<Vec<_>>())?,
            Some(OutputFormat::Json) => {
                let entries = all.enumerate();
                let data =
                    entries.map(|(index, embedding)| ListEntry { object: "embedding", index, embedding });
                serde_json::to_writer(out, &List { object: "list", data: data.collect() })?;
            }
            None => {
                let embeddings = rows
                    .iter()
                    .zip(all)
                    .map(|((text, tokens, _), embedding)| TextEmbedding { text, tokens: *tokens, embedding })
                    .collect();
                let (model, pooling) = (self.model, self.pooling.name());
                serde_json::to_writer(out, &Embeddings { model, pooling, embeddings })?;
            }
        }
        Ok(())
    }

    /// Writes the cosine of each pair of texts.
    pub(super) fn write_similarity(&self, rows: &[Row<'_>], out: &mut dyn Write) -> Outcome {
        let row = |a: &[f32]| rows.iter().map(|(.., b)| cosine(a, b) as f32).collect();
        let similarity = rows.iter().map(|(.., vector)| row(vector)).collect();
        let (model, pooling) = (self.model, self.pooling.name());
        let texts = rows.iter().map(|(text, ..)| *text).collect();
        Ok(serde_json::to_writer(out, &Similarity { model, pooling, texts, similarity })?)
    }
}
