//! What schedulers, sessions and readers of instances accept, and the places that their errors name.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::sync::Arc;

use quadriga_graph::{DType, Graph, GraphBuilder};
use quadriga_runtime::memory::MemoryError;
use quadriga_runtime::memory::packing::{CsvError, parse_csv};
use quadriga_runtime::{BackendError, RuntimeError, Scheduler, Session};
use quadriga_sim::Sim;

fn squares() -> Graph {
    let g = GraphBuilder::new();
    g.output("y", g.input("x", DType::F32, [6]).sqr());
    g.finish().unwrap()
}

#[test]
fn a_scheduler_takes_backends_and_graphs_in_many_forms() {
    let backends = (Sim::new("a").build(), Sim::new("b").build(), Sim::new("c").build());
    let scheduler = Scheduler::new(backends);
    let names: Vec<&str> = scheduler.backends().iter().map(|backend| backend.name()).collect();
    assert_eq!(names, ["a", "b", "c"]);
    let same = Scheduler::new(scheduler.backends());
    assert!(same.backends().iter().map(|backend| backend.name()).eq(names));
    let shared = Arc::new(squares());
    let fingerprint = shared.fingerprint();
    assert_eq!(scheduler.plan(&shared).unwrap().graph().fingerprint(), fingerprint);
    assert_eq!(scheduler.plan(&*shared).unwrap().graph().fingerprint(), fingerprint);
    assert_eq!(scheduler.plan(shared).unwrap().graph().fingerprint(), fingerprint);
    assert_eq!(scheduler.plan(squares()).unwrap().graph().fingerprint(), fingerprint);
}

#[test]
fn a_new_budget_takes_the_place_of_that_of_the_same_backend_only() {
    let scheduler = Scheduler::new([Sim::new("a").build(), Sim::new("b").build()]);
    assert_eq!([scheduler.budget_of(0), scheduler.budget_of(1)], [None; 2]);
    let scheduler = scheduler.budget(0, 10).budget(1, 20).budget(0, 1000);
    assert_eq!([scheduler.budget_of(0), scheduler.budget_of(1)], [Some(1000), Some(20)]);
    assert!(scheduler.plan(squares()).is_ok());
    assert!(matches!(scheduler.budget(0, 10).plan(squares()), Err(RuntimeError::OverBudget(_))));
}

#[test]
fn a_part_of_an_input_is_set_from_any_kind_of_values() {
    let mut session = Scheduler::new(Sim::new("a").build()).plan(squares()).unwrap().session().unwrap();
    let mut squares_after = |set: &dyn Fn(&mut Session)| {
        session.set("x", &[1.0f32; 6]).unwrap();
        set(&mut session);
        session.run(&[]).unwrap();
        session.read::<f32>("y").unwrap()
    };
    let expected = [1.0, 1.0, 1.0, 4.0, 9.0, 1.0];
    let (array, list) = ([2.0f32, 3.0], vec![2.0f32, 3.0]);
    assert_eq!(squares_after(&|session| session.set_at("x", 3, &array).unwrap()), expected);
    assert_eq!(squares_after(&|session| session.set_at("x", 3, &list).unwrap()), expected);
    assert_eq!(squares_after(&|session| session.set_at("x", 3, list.as_slice()).unwrap()), expected);
    assert_eq!(squares_after(&|session| session.set_at("x", 3, &list.as_slice()).unwrap()), expected);
}

#[test]
fn values_of_another_type_are_refused_however_they_are_given() {
    let g = GraphBuilder::new();
    g.output("y", g.input("x", DType::F32, [2]).sqr());
    let mut session = Session::new(&Scheduler::new(Sim::new("a").build())).unwrap();
    session.use_graph(g.finish().unwrap()).unwrap();
    let list = vec![1i32, 2];
    let refused = |set: Result<(), RuntimeError>| matches!(set, Err(RuntimeError::WrongType { .. }));
    assert!(refused(session.set("x", &[1i32, 2])));
    assert!(refused(session.set("x", list.as_slice())));
    assert!(refused(session.set("x", &list)));
    assert!(refused(session.set("x", &&list)));
}

#[test]
fn errors_of_packing_instances_name_the_line() {
    let field = |text: &str| match parse_csv(text).unwrap_err() {
        CsvError::Field { line, column, .. } => (line, column),
        other => panic!("{other}"),
    };
    let heading = "id,lower,upper,size\n0,0,2,4\n";
    assert_eq!(field(&format!("{heading}\n1,1,x,8\n")), (4, "upper"));
    assert_eq!(field(&format!("{heading}1,1,3\n")), (3, "size"));
    assert_eq!(field(&format!("{heading}1,4294967296,3,8\n")), (3, "lower"));
    assert_eq!(parse_csv("id,lower,size").unwrap_err(), CsvError::Heading { column: "upper" });
    assert_eq!(parse_csv(heading).unwrap().len(), 1);
}

#[test]
fn a_refused_allocation_says_what_is_free() {
    let error = |free| {
        let source = Box::new(BackendError::OutOfMemory { backend: "gpu".into(), requested: 9, free });
        MemoryError::Allocation { backend: "gpu".into(), purpose: "chunk 1".into(), wanted: 9, free, source }
            .to_string()
    };
    assert!(error(None).starts_with("gpu: cannot allocate 9 B for chunk 1: "), "{}", error(None));
    assert!(
        error(Some(5)).starts_with("gpu: cannot allocate 9 B for chunk 1, 5 B are free: "),
        "{}",
        error(Some(5))
    );
}
