//! Joining neighbouring operations into steps, so that fewer barriers are needed and rows stay in the cache.
//!
//! Three kinds of joining, all of which leave the arithmetic as it is, so that results are the same bit for bit:
//!
//! - Operations too small to share out follow each other on one thread. That is always right: one thread keeps
//!   the order.
//! - Operations with equally many units, each of which touches only its own share of what the others write (its
//!   rows), run unit by unit: a thread takes some rows through all of them, from the residual sum through the norm
//!   to the activations of the next product.
//! - Products of the same activations (queries, keys and values; gate and up) prepare them once and run as one step,
//!   where moving the later product forward changes nothing: nobody between them touches what it writes.
//! - Of few rows, every thread prepares the activations for itself, from the norm or the gated unit on (see
//!   ops/source.rs), and what comes after a product element by element (a bias, the residual) is done to each piece of
//!   the result by the thread that has just computed it. So a layer of one token has six steps.

use crate::kernels::KernelError;
use crate::ops::{MOST, Multiplication, Product};
use crate::step::{Access, Part, Step, TINY, Team};

/// Work memory for a number of threads.
pub(crate) type WorkBytes = Box<dyn Fn(usize) -> Result<usize, KernelError> + Send>;

/// An operation that all threads compute together.
pub(crate) struct TeamItem {
    pub(crate) team: Box<dyn Team>,
    pub(crate) accesses: Vec<Access>,
    pub(crate) work_bytes: WorkBytes,
    pub(crate) name: usize,
    /// What it does, in a word.
    pub(crate) label: &'static str,
}

/// An operation to be made a step of, or part of one.
pub(crate) enum Item {
    /// Units of work.
    Part(Part),
    /// A product with packed weights.
    Product(Product),
    /// All threads together.
    Team(TeamItem),
}

impl Item {
    /// Sets the index of the node's name, and what the operation is called.
    pub(crate) fn set_name(&mut self, name: usize, label: &'static str) {
        match self {
            Item::Part(part) => (part.name, part.label) = (name, label),
            Item::Product(product) => product.set_name(name),
            Item::Team(item) => (item.name, item.label) = (name, label),
        }
    }
}

/// A step that may still be added to.
enum Growing {
    Single(Vec<Part>),
    Shared(Vec<Part>),
    Products(Multiplication),
    Team(TeamItem),
}

impl Growing {
    /// Whether the order of this step and an operation with these accesses matters.
    fn conflicts(&self, accesses: &[Access]) -> bool {
        let any = |own: &[Access]| own.iter().any(|a| accesses.iter().any(|b| a.conflicts(b)));
        match self {
            Growing::Single(parts) | Growing::Shared(parts) => parts.iter().any(|part| any(&part.accesses)),
            Growing::Products(Multiplication { products, then, .. }) => {
                products.iter().any(|product| any(product.accesses()))
                    || then.iter().any(|(_, part)| any(&part.accesses))
            }
            Growing::Team(item) => any(&item.accesses),
        }
    }
}

/// Joins operations into steps, or makes each a step of its own; also tells the work memory they need.
pub(crate) fn join(items: Vec<Item>, fuse: bool) -> (Vec<Step>, WorkBytes) {
    let mut steps: Vec<Growing> = Vec::new();
    for item in items {
        match item {
            Item::Part(part) => add_part(&mut steps, part, fuse),
            Item::Product(product) => {
                if let Some(product) = join_product(&mut steps, product, fuse) {
                    if !product.is_private() {
                        add_part(&mut steps, product.preparation(), fuse);
                    }
                    steps.push(Growing::Products(Multiplication::new(product)));
                }
            }
            Item::Team(item) => steps.push(Growing::Team(item)),
        }
    }
    let mut needs: Vec<WorkBytes> = Vec::new();
    let steps = steps.into_iter().map(|step| finish(step, &mut needs)).collect();
    let largest = move |threads| needs.iter().try_fold(0, |most, need| Ok(need(threads)?.max(most)));
    (steps, Box::new(largest))
}

fn finish(step: Growing, needs: &mut Vec<WorkBytes>) -> Step {
    match step {
        Growing::Single(parts) => Step::Single(parts),
        Growing::Shared(parts) => Step::Shared(parts),
        Growing::Products(all) => {
            let then = all.then.iter().map(|(_, part)| part);
            let names =
                all.products.iter().flat_map(Product::names).chain(then.clone().map(|part| part.name));
            let names = names.collect();
            for product in &all.products {
                let need = product.work_need();
                needs.push(Box::new(move |threads| need.bytes(threads)));
            }
            let mut label = format!("mul_mat × {}", all.products.len());
            for part in then {
                label = label + " + " + part.label;
            }
            Step::Team { team: Box::new(all), names, label }
        }
        Growing::Team(TeamItem { team, work_bytes, name, label, .. }) => {
            needs.push(work_bytes);
            Step::Team { team, names: vec![name], label: label.to_owned() }
        }
    }
}

fn is_tiny(part: &Part) -> bool {
    part.units <= 1 || part.cost <= TINY
}

/// Adds a part to the last step if that is right and pays; else makes a step of it.
fn add_part(steps: &mut Vec<Growing>, part: Part, fuse: bool) {
    match steps.last_mut() {
        Some(Growing::Single(parts)) if fuse && is_tiny(&part) => parts.push(part),
        Some(Growing::Shared(parts)) if fuse && goes_with(parts, &part) => parts.push(part),
        Some(Growing::Products(all)) if fuse && let Some((number, together)) = follows(all, &part) => {
            all.then.push((number, part));
            all.together |= together;
        }
        _ if is_tiny(&part) => steps.push(Growing::Single(vec![part])),
        _ => steps.push(Growing::Shared(vec![part])),
    }
}

/// Whether a part can run unit by unit with others: equally many units, and no unit touches what another writes.
fn goes_with(parts: &[Part], part: &Part) -> bool {
    parts.iter().all(|other| {
        let apart = |theirs: &Access| part.accesses.iter().all(|ours| !theirs.conflicts_across_units(ours));
        other.units == part.units && other.accesses.iter().all(apart)
    })
}

/// After which product of a step a part may be done, column by column as soon as they are there, and whether all products
/// of the step must then be computed column by column together: the part is small, works element by element on the
/// result of one product or of all of them, touches nothing else that the step writes, and writes nothing else that it
/// reads.
fn follows(all: &Multiplication, part: &Part) -> Option<(usize, bool)> {
    let extent = part.by_columns.filter(|_| is_tiny(part))?;
    let results = |number: usize| {
        let product = all.products.get(number).into_iter().flat_map(Product::accesses);
        let then = all.then.iter().filter(move |(of, _)| *of == number).flat_map(|(_, part)| &part.accesses);
        product.chain(then).filter(|access| access.is_write())
    };
    let of = |number: usize, access: &Access| results(number).any(|result| result.is_where(access));
    let is_read = |number: &usize| part.accesses.iter().any(|a| !a.is_write() && of(*number, a));
    let read: Vec<usize> = (0..all.products.len()).filter(is_read).collect();
    let last = *read.last()?;
    let together = read.len() > 1;
    let fits = read.len() == 1 || read.len() == all.products.len();
    let same = |number: &usize| all.products.get(*number).is_some_and(|product| product.extent() == extent);
    let is_own = |access: &Access| read.iter().any(|number| of(*number, access));
    let apart = |other: &Access| {
        part.accesses.iter().all(|access| !access.conflicts(other) || (is_own(access) && is_own(other)))
    };
    let products = all.products.iter().flat_map(Product::accesses);
    let mut others = products.chain(all.then.iter().flat_map(|(_, part)| &part.accesses));
    (fits && read.iter().all(same) && others.all(apart)).then_some((last, together))
}

/// Adds a product to an earlier step of products on the same activations, if it may be moved there; else gives it
/// back.
fn join_product(steps: &mut [Growing], product: Product, fuse: bool) -> Option<Product> {
    if !fuse {
        return Some(product);
    }
    for step in steps.iter_mut().rev() {
        let conflicts = step.conflicts(product.accesses());
        match step {
            Growing::Products(Multiplication { products, together: false, .. })
                if !conflicts
                    && products.len() < MOST
                    && products.first().is_some_and(|first| first.shares_activations(&product)) =>
            {
                products.push(product);
                return None;
            }
            _ if conflicts => return Some(product),
            _ => {}
        }
    }
    Some(product)
}
