//! G3: every operation that may compute in place does so in a session, with the same results as in memory of its own.
//! The tests of other backends use it, too.
#![allow(dead_code, reason = "each test uses a part of it")]

use quadriga_graph::{DType, Graph, GraphBuilder, Pairing, Rope, TensorId, Value};
use quadriga_runtime::{Plan, Scheduler};

pub(crate) type Make = for<'g> fn(&'g GraphBuilder, Value<'g>) -> Value<'g>;

fn other<'g>(g: &'g GraphBuilder) -> Value<'g> {
    g.input("other", DType::F32, [2, 4, 8])
}

fn rope<'g>(g: &'g GraphBuilder, x: Value<'g>, pairing: Pairing, dims: usize) -> Value<'g> {
    let rope = Rope::new(dims, pairing, 10000.0);
    x.rope(rope, g.input("positions", DType::I32, [2]), None)
}

pub(crate) const OPERATIONS: [(&str, Make); 21] = [
    ("scale", |_, x| x.scale(2.0)),
    ("diag_mask_inf", |_, x| x.diag_mask_inf(1)),
    ("diag_mask_zero", |_, x| x.diag_mask_zero(1)),
    ("add", |g, x| x.add(other(g))),
    ("add, second input", |g, x| other(g).add(x)),
    ("add1", |g, x| x.add1(g.input("one", DType::F32, [1]))),
    ("sub", |g, x| x.sub(other(g))),
    ("sub, second input", |g, x| other(g).sub(x)),
    ("mul", |g, x| x.mul(other(g))),
    ("div", |g, x| x.div(other(g))),
    ("div, second input", |g, x| other(g).div(x)),
    ("sqr", |_, x| x.sqr()),
    ("sqrt", |_, x| x.sqrt()),
    ("log", |_, x| x.log()),
    ("unary", |_, x| x.gelu()),
    ("rms_norm", |_, x| x.rms_norm(1e-5)),
    ("norm", |_, x| x.norm(1e-5)),
    ("soft_max", |_, x| x.soft_max(0.5, None, None)),
    ("rope, adjacent pairs", |g, x| rope(g, x, Pairing::Adjacent, 8)),
    ("rope, halves", |g, x| rope(g, x, Pairing::Half, 8)),
    ("rope, some dimensions", |g, x| rope(g, x, Pairing::Half, 4)),
];

/// The operation on a fresh result; with `kept`, that result is an output and cannot be overwritten.
fn graph(make: Make, kept: bool) -> (Graph, TensorId, TensorId) {
    let g = GraphBuilder::new();
    let x = g.input("x", DType::F32, [2, 4, 8]).repeat([2, 4, 8]);
    let y = make(&g, x);
    g.output("y", y);
    if kept {
        g.output("x", x);
    }
    let (x, y) = (x.id(), y.id());
    (g.finish().unwrap(), x, y)
}

fn in_place(plan: &Plan, x: TensorId, y: TensorId) -> bool {
    assert_eq!(plan.memory().location(x) == plan.memory().location(y), {
        let sharing = &plan.memory().sharing;
        sharing.root(x) == sharing.root(y)
    });
    plan.memory().location(x) == plan.memory().location(y)
}

/// Runs every operation on a fresh result: alone, where that result is kept, and in its memory. Results are equal up to `tolerance`.
pub(crate) fn check_in_place(scheduler: &Scheduler, tolerance: f32) {
    let values: Vec<f32> = (0..64).map(|i| (i as f32 * 0.37).sin() + 1.5).collect();
    let others: Vec<f32> = (0..64).map(|i| (i as f32 * 0.91).cos() + 2.0).collect();
    for (name, make) in OPERATIONS {
        let run = |kept: bool| {
            let (graph, x, y) = graph(make, kept);
            let plan = scheduler.plan(&graph).unwrap();
            assert_eq!(in_place(&plan, x, y), !kept, "{name}");
            let mut session = plan.session().unwrap();
            session.set("x", &values).unwrap();
            for input in session.inputs().unwrap() {
                match input.name.as_str() {
                    "other" => session.set("other", &others).unwrap(),
                    "one" => session.set("one", &[0.25f32]).unwrap(),
                    "positions" => session.set("positions", &[3i32, 11]).unwrap(),
                    _ => {}
                }
            }
            session.run(&[]).unwrap();
            if kept {
                assert_eq!(session.read::<f32>("x").unwrap(), values, "{name}");
            }
            session.read::<f32>("y").unwrap()
        };
        let (alone, shared) = (run(true), run(false));
        let equal = |(a, b): (&f32, &f32)| a == b || (a - b).abs() <= tolerance * (1.0 + a.abs());
        assert!(alone.iter().zip(&shared).all(equal), "{name}: {alone:?} and {shared:?}");
        assert_ne!(shared, values, "{name}");
    }
}
