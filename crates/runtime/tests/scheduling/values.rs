//! Values in a tensor's own type, conversions from and to f32, and outputs found by name or id.

use quadriga_conformance::Rng;
use quadriga_graph::{DType, Graph, GraphBuilder, Weight};
use quadriga_runtime::{RuntimeError, Scheduler, Session, bf16, f16};

use crate::common::{chain_input, device, host, numbers};

/// An input of each float type, each an output in its own type and in another.
fn graph() -> Graph {
    let g = GraphBuilder::new();
    let a = g.input("a", DType::F16, [2, 3]);
    let b = g.input("b", DType::BF16, [2, 3]);
    let half = g.state("half", DType::F16, [2, 3]);
    let scope = g.scope("sums");
    let sum = a.cast(DType::F32).add(b.cast(DType::F32)).named("sum");
    drop(scope);
    g.output("sum", sum);
    g.output("brain", sum.cast(DType::BF16));
    g.output("kept", sum.cast(DType::F16).copy_into(half));
    g.output("quants", g.input("q", DType::Q8_0, [32]));
    g.output("ids", g.input("i", DType::I32, [2]));
    g.output("across", sum.transpose());
    g.finish().unwrap()
}

fn sessions() -> Vec<Session> {
    let cpu = Scheduler::new(quadriga_cpu::Backend::new().unwrap());
    let both = Scheduler::new([device("gpu"), host("cpu")]).place(|name| (name == "half").then_some(1));
    let all = [cpu, Scheduler::new(device("gpu")), both];
    all.iter().map(|scheduler| scheduler.plan(graph()).unwrap().session().unwrap()).collect()
}

#[test]
fn half_precision_values_go_in_and_out_as_they_are() {
    let a = [0.5f32, -1.0, 2.25, 65504.0, 6.1e-5, 0.0].map(f16::from_f32);
    let b = [1.0f32, 3.0, -2.0, 0.0, 0.0, 1e30].map(bf16::from_f32);
    for mut session in sessions() {
        session.set("q", &[7u8; 34]).unwrap();
        session.run(&[("a", &a), ("b", &b), ("i", &[3i32, 4])]).unwrap();
        let sums: Vec<f32> = a.iter().zip(&b).map(|(a, b)| a.to_f32() + b.to_f32()).collect();
        assert_eq!(session.read::<f32>("sum").unwrap(), sums);
        let brain: Vec<bf16> = sums.iter().map(|sum| bf16::from_f32(*sum)).collect();
        assert_eq!(session.read::<bf16>("brain").unwrap(), brain);
        let kept: Vec<f16> = sums.iter().map(|sum| f16::from_f32(*sum)).collect();
        assert_eq!(session.read::<f16>("kept").unwrap(), kept);
        assert_eq!(session.read_state::<f16>("half").unwrap(), kept);
        let error = session.read::<f16>("brain").unwrap_err();
        assert!(matches!(error, RuntimeError::WrongType { given: DType::F16, found: DType::BF16, .. }));
        assert!(matches!(session.set("a", &b), Err(RuntimeError::WrongType { .. })));
    }
}

#[test]
fn f32_values_are_converted_only_when_asked() {
    // 1 + 2⁻¹¹ is halfway between two f16, 1 + 2⁻⁸ between two bf16: both round to even, which is 1.
    let a = [1.0f32 + 1.0 / 2048.0, 1e6, -1e6, 1e-9, 2.5, f32::NAN];
    let b = [1.0f32 + 1.0 / 256.0, 0.0, 0.0, 0.0, 1.0, 0.0];
    let q: Vec<f32> = (0..32).map(|i| (i - 16) as f32).collect();
    for mut session in sessions() {
        assert!(matches!(session.set("a", &a), Err(RuntimeError::WrongType { .. })));
        session.set_from_f32("a", &a).unwrap();
        session.set_from_f32("b", &b).unwrap();
        session.set_from_f32("q", &q).unwrap();
        session.run(&[("i", &[3i32, 4])]).unwrap();
        let sums = session.read_as_f32("sum").unwrap();
        assert_eq!(sums[..5], [2.0, f32::INFINITY, f32::NEG_INFINITY, 0.0, 3.5]);
        assert!(sums[5].is_nan());
        assert_eq!(session.read_as_f32("kept").unwrap()[..5], sums[..5]);
        assert_eq!(session.read_state_as_f32("half").unwrap()[..5], sums[..5]);
        assert_eq!(session.read_as_f32("brain").unwrap()[4], 3.5);
        let quants = session.read_as_f32("quants").unwrap();
        assert!(quants.iter().zip(&q).all(|(a, b)| (a - b).abs() <= 0.07), "{quants:?}");
        session.write_state_from_f32("half", &[0.25; 6]).unwrap();
        assert_eq!(session.read_state::<f16>("half").unwrap(), [f16::from_f32(0.25); 6]);

        let error = session.set_from_f32("a", &[1.0; 5]).unwrap_err();
        assert_eq!(error.to_string(), "a has 6 elements, not 5");
        assert!(matches!(session.set_from_f32("i", &[1.0; 2]), Err(RuntimeError::NoConversion { .. })));
        assert!(matches!(session.read_as_f32("ids"), Err(RuntimeError::NoConversion { .. })));
        assert!(matches!(session.read_as_f32("across"), Err(RuntimeError::Strided { .. })));
        assert!(matches!(session.write_state_from_f32("half", &[]), Err(RuntimeError::WrongCount { .. })));
        assert!(matches!(session.set_from_f32("none", &[]), Err(RuntimeError::UnknownName { .. })));
    }
}

#[test]
fn outputs_are_found_by_their_name_their_tensor_or_id() {
    for mut session in sessions() {
        session.set("q", &[7u8; 34]).unwrap();
        let one = [f16::ONE; 6];
        session.run(&[("a", &one), ("b", &[bf16::ONE; 6]), ("i", &[3i32, 4])]).unwrap();
        let inputs: Vec<String> = session.inputs().unwrap().into_iter().map(|input| input.name).collect();
        assert_eq!(inputs, ["a", "b", "q", "i"]);
        let outputs = session.outputs().unwrap();
        let names: Vec<&str> = outputs.iter().map(|output| output.name.as_str()).collect();
        assert_eq!(names, ["sum", "brain", "kept", "quants", "ids", "across"]);
        let sum = session.output("sum").unwrap();
        assert_eq!(
            (sum.tensor_name.as_str(), sum.dtype, sum.shape.dims()),
            ("sums.sum", DType::F32, &[2, 3][..])
        );
        assert_eq!(session.output("sums.sum").unwrap(), sum);
        assert_eq!(session.output(sum.id).unwrap(), sum);
        assert_eq!(session.read::<f32>("sums.sum").unwrap(), [2.0; 6]);
        assert_eq!(session.read::<f32>(sum.id).unwrap(), [2.0; 6]);
        // An input that is an output, by the input's name.
        assert_eq!(session.read::<i32>("i").unwrap(), [3, 4]);
        let error = session.output("a").unwrap_err();
        assert_eq!(error.to_string(), "tensor a is not an output");
        assert!(matches!(session.read::<f32>("nowhere"), Err(RuntimeError::UnknownName { .. })));
    }
    let empty = Session::new(&Scheduler::new(host("cpu"))).unwrap();
    assert!(matches!(empty.outputs(), Err(RuntimeError::NoPlan)));
    assert!(matches!(empty.output("y"), Err(RuntimeError::NoPlan)));
}

/// Staging memory of an earlier read is used again only if it is large enough and of the same device.
#[test]
fn outputs_of_any_size_and_device_are_read_without_waiting() {
    let g = GraphBuilder::new();
    let x = g.input("x", DType::F32, [4, 8]);
    let w = |name: &str| g.weight(name, Weight::with_data(DType::F32, [8, 8], numbers(&mut Rng::new(3), 64)));
    let (here, there) = (w("here").mul_mat(x), w("there").mul_mat(x));
    let outputs = [
        ("large here", here),
        ("large there", there),
        ("small here", here.slice(0, 0, 1).sqr()),
        ("small there", there.slice(0, 0, 1).sqr()),
    ];
    outputs.into_iter().for_each(|(name, value)| g.output(name, value));
    let plan = Scheduler::new([device("a"), device("b")])
        .place(|name| Some((name == "there").into()))
        .plan(g.finish().unwrap())
        .unwrap();
    let mut session = plan.session().unwrap();
    session.run(&[("x", &chain_input())]).unwrap();
    for reads in [
        ["small here", "large there"],
        ["small there", "large here"],
        ["large here", "large there"],
        ["large there", "small there"],
        ["small there", "small here"],
        ["large here", "small there"],
    ] {
        let expected: Vec<u8> = reads.iter().flat_map(|name| session.read::<u8>(name).unwrap()).collect();
        // Both slots for pending reads are used in turn.
        for _ in 0..2 {
            let pending = session.read_async(&reads).unwrap();
            let mut bytes = vec![0; expected.len()];
            session.finish_read(pending, &mut bytes).unwrap();
            assert_eq!(bytes, expected, "{reads:?}");
        }
    }
}
