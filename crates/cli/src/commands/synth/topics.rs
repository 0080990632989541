//! Topics: a model whose tokens make its routers choose some experts more often than others, as trained models do.
//!
//! Token `t` belongs to topic `t % count`. Its embedding has a strong component in the topic's direction, which outweighs
//! what the layers add; each router prefers some experts of its layer where it sees that direction. Of 128 experts, 8 of
//! which a token uses, 45 % are then used by the next token of the same topic, too, and 80 % were used by one of the eight
//! before.

use std::io;

use quadriga_conformance::Rng;
use quadriga_gguf::{Result, Writer};
use quadriga_graph::{DType, Shape, blocks};
use quadriga_llm::models::TensorSpec;

use crate::interrupt::CtrlC;

/// The key of a file's number of topics.
pub(crate) const TOPICS_KEY: &str = "quadriga.topics";

/// The root mean squares of an embedding's components: its topic's, and its own. A layer adds one of about 1.
const TOPIC: f32 = 16.0;
const TOKEN: f32 = 8.0;

/// How much a router prefers the first expert of a topic, in standard deviations of the rest of its logits.
const PREFERENCE: f32 = 3.5;
/// The preference falls to 1/e in so many ranks for each expert that a token uses.
const RANKS_PER_USED: f32 = 2.0;

/// The parts of a normed row that are the topic's and that are not, as far as layers add what they add in forty layers.
const SEEN: f32 = 0.78;
const UNSEEN: f32 = 0.63;

/// The topics of a model.
pub(super) struct Topics {
    count: usize,
    /// Experts that a token uses.
    used: usize,
    seed: u64,
}

impl Topics {
    pub(super) fn new(count: usize, used: usize, seed: u64) -> Topics {
        Topics { count, used, seed }
    }

    /// Adds a tensor that knows topics; `false` for others.
    pub(super) fn tensor<'a>(
        &self,
        writer: &mut Writer<'a>,
        spec: &TensorSpec,
        dtype: DType,
        ctrl_c: &'a CtrlC,
    ) -> Result<bool> {
        let (name, dims) = (spec.name.as_str(), spec.dims.as_slice());
        let [rows, columns] = *dims else { return Ok(false) };
        let directions: Vec<Vec<f32>> = (0..self.count).map(|topic| self.direction(topic, columns)).collect();
        if name == "token_embd.weight" {
            let seed = self.seed ^ 0x746f_6b65_6e73;
            // A type that values can be converted to.
            let probe = dtype.row_bytes(columns).is_some_and(|bytes| {
                blocks::quantize(dtype, &vec![0.0; columns], &mut vec![0; bytes]).is_ok()
            });
            let dtype = if probe { dtype } else { DType::F16 };
            self.add(writer, name, dtype, [rows, columns], ctrl_c, move |row, values| {
                let mut rng = Rng::new(seed ^ (row as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15));
                let direction = row.checked_rem(directions.len()).and_then(|topic| directions.get(topic));
                for (value, topic) in values.iter_mut().zip(direction.into_iter().flatten()) {
                    *value = TOPIC * topic + TOKEN * normal(&mut rng);
                }
            })?;
            return Ok(true);
        }
        if !name.ends_with("ffn_gate_inp.weight") {
            return Ok(false);
        }
        // For each topic, the ranks of the experts: another order in every layer.
        let hash =
            name.bytes().fold(7, |hash: u64, byte| hash.wrapping_mul(31).wrapping_add(u64::from(byte)));
        let mut rng = Rng::new(self.seed ^ hash);
        let ranks: Vec<Vec<usize>> = (0..self.count).map(|_| shuffled(rows, &mut rng)).collect();
        let seed = rng.next_u64();
        let fall = RANKS_PER_USED * self.used as f32;
        self.add(writer, name, DType::F32, [rows, columns], ctrl_c, move |row, values| {
            let mut rng = Rng::new(seed ^ (row as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15));
            let own = 1.0 / (UNSEEN * (columns as f32).sqrt());
            values.iter_mut().for_each(|value| *value = own * normal(&mut rng));
            for (direction, ranks) in directions.iter().zip(&ranks) {
                let rank = ranks.get(row).copied().unwrap_or(0) as f32;
                let factor = PREFERENCE * (-rank / fall).exp() / (SEEN * columns as f32);
                values.iter_mut().zip(direction).for_each(|(value, topic)| *value += factor * topic);
            }
        })?;
        Ok(true)
    }

    /// The direction of a topic: every element is 1 or −1.
    fn direction(&self, topic: usize, width: usize) -> Vec<f32> {
        let mut rng = Rng::new(self.seed ^ (topic as u64 + 1).wrapping_mul(0xd1b5_4a32_d192_ed03));
        (0..width).map(|_| if rng.next_u64() >> 63 == 0 { 1.0 } else { -1.0 }).collect()
    }

    fn add<'a>(
        &self,
        writer: &mut Writer<'a>,
        name: &str,
        dtype: DType,
        [rows, columns]: [usize; 2],
        ctrl_c: &'a CtrlC,
        fill: impl Fn(usize, &mut [f32]) + Sync + 'a,
    ) -> Result<()> {
        let bytes = dtype.row_bytes(columns).unwrap_or(0);
        writer.tensor(name, dtype, Shape::from([rows, columns]), move |out| {
            let (mut values, mut row_bytes) = (vec![0.0; columns], vec![0; bytes]);
            for row in 0..rows {
                if ctrl_c.is_pressed() {
                    return Err(io::Error::other("interrupted"));
                }
                fill(row, &mut values);
                blocks::quantize(dtype, &values, &mut row_bytes).map_err(io::Error::other)?;
                out.write_all(&row_bytes)?;
            }
            Ok(())
        })?;
        Ok(())
    }
}

/// About a normal distribution: a sum of four uniform ones, with a variance of 1.
fn normal(rng: &mut Rng) -> f32 {
    let bits = rng.next_u64();
    let sum: u64 = (0..4).map(|part| bits >> (16 * part) & 0xffff).sum();
    (sum as f32 / 65536.0 - 2.0) * 3f32.sqrt()
}

pub(super) fn shuffled(count: usize, rng: &mut Rng) -> Vec<usize> {
    let mut order: Vec<usize> = (0..count).collect();
    for at in (1..count).rev() {
        order.swap(at, (rng.next_u64() % (at as u64 + 1)) as usize);
    }
    order
}

#[cfg(test)]
mod tests {
    use quadriga_gguf::File;

    use super::*;
    use crate::interrupt::catch;

    /// The rows of a tensor that topics write.
    fn rows(topics: &Topics, name: &str, dims: [usize; 2]) -> Vec<Vec<f32>> {
        let ctrl_c = catch();
        let mut writer = Writer::new();
        let spec = TensorSpec { name: name.to_owned(), dims: dims.to_vec(), f32_only: false };
        assert!(topics.tensor(&mut writer, &spec, DType::F32, &ctrl_c).unwrap());
        let mut bytes = Vec::new();
        writer.write_to(&mut bytes).unwrap();
        let file = File::from_bytes(bytes).unwrap();
        let bytes = file.tensors().next().unwrap().bytes().to_vec();
        let values: Vec<f32> =
            bytes.as_chunks::<4>().0.iter().map(|value| f32::from_le_bytes(*value)).collect();
        values.chunks(dims[1]).map(<[f32]>::to_vec).collect()
    }

    /// What the module's text says of 128 experts, 8 of which a token uses, in a layer that sees what the layers before it have added.
    #[test]
    fn tokens_of_a_topic_use_the_same_experts_as_often_as_the_text_says() {
        let (width, experts, used, count, tokens) = (512, 128, 8, 4, 96);
        let topics = Topics::new(count, used, 11);
        let embeddings = rows(&topics, "token_embd.weight", [tokens * count, width]);
        let mut rng = Rng::new(3);
        let (mut next, mut of_eight, mut pairs) = (0, 0, [0, 0]);
        for layer in 0..6 {
            let router = rows(&topics, &format!("blk.{layer}.ffn_gate_inp.weight"), [experts, width]);
            for topic in 0..count {
                let mut seen: Vec<Vec<usize>> = Vec::new();
                for token in 0..tokens {
                    // As much as forty layers add.
                    let added = (TOPIC * TOPIC / (SEEN * SEEN) - TOPIC * TOPIC - TOKEN * TOKEN).sqrt();
                    let row: Vec<f32> = embeddings[token * count + topic]
                        .iter()
                        .map(|x| x + added * normal(&mut rng))
                        .collect();
                    let norm = (row.iter().map(|x| x * x).sum::<f32>() / width as f32).sqrt();
                    let logit = |weights: &Vec<f32>| -> f32 {
                        weights.iter().zip(&row).map(|(w, x)| w * x / norm).sum()
                    };
                    let mut order: Vec<(f32, usize)> =
                        router.iter().map(logit).enumerate().map(|(expert, logit)| (logit, expert)).collect();
                    order.sort_by(|a, b| b.0.total_cmp(&a.0));
                    let chosen: Vec<usize> = order[..used].iter().map(|(_, expert)| *expert).collect();
                    if let Some(last) = seen.last() {
                        next += chosen.iter().filter(|expert| last.contains(expert)).count();
                        pairs[0] += used;
                    }
                    if seen.len() >= 8 {
                        let recent = &seen[seen.len() - 8..];
                        let hit = |expert: &&usize| recent.iter().any(|experts| experts.contains(expert));
                        of_eight += chosen.iter().filter(hit).count();
                        pairs[1] += used;
                    }
                    seen.push(chosen);
                }
            }
        }
        let [next, of_eight] = [next as f64 / pairs[0] as f64, of_eight as f64 / pairs[1] as f64];
        println!("{next:.3} of the next token's, {of_eight:.3} among those of eight");
        assert!((next - 0.45).abs() < 0.08, "{next:.3} of the next token's experts");
        assert!((of_eight - 0.80).abs() < 0.08, "{of_eight:.3} among those of the eight tokens before");
    }
}
