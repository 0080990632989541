//! Bad data in one session is reported there, and not in another session of the same backend. Says so and passes where
//! there is no device.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout, reason = "tests")]

use std::sync::Arc;

use quadriga_graph::{DType, Data, Graph, GraphBuilder, Weight};
use quadriga_runtime::{Backend, BackendError, RuntimeError, Scheduler};

fn graph() -> Graph {
    let g = GraphBuilder::new();
    let table = g.weight("table", Weight::with_data(DType::F32, [4, 8], Data::from(vec![0u8; 4 * 8 * 4])));
    g.output("rows", table.get_rows(g.input("ids", DType::I32, [2])));
    g.finish().unwrap()
}

#[test]
fn a_row_index_out_of_range_fails_its_own_session_only() {
    let backend: Arc<dyn Backend> = match quadriga_cuda::Backend::new(0) {
        Ok(backend) => Arc::new(backend),
        Err(reason) => {
            println!("skipped, there is no GPU: {reason}");
            return;
        }
    };
    let plan = || Scheduler::new([Arc::clone(&backend)]).plan(graph()).unwrap();
    let (mut good, mut bad) = (plan().session().unwrap(), plan().session().unwrap());
    for _ in 0..3 {
        // The fault is reported when the bad session waits, not when the other one does.
        let failed = bad.run(&[("ids", &[1i32, 4])]).err();
        good.run(&[("ids", &[0i32, 3])]).unwrap();
        let error = failed.unwrap_or_else(|| panic!("index 4 of 4 rows is not reported"));
        let RuntimeError::Device { error, .. } = error else { panic!("{error}") };
        let BackendError::Node { reason, .. } = &*error else { panic!("{error}") };
        assert_eq!(reason, "a row index is out of range");
    }
    bad.run(&[("ids", &[1i32, 2])]).unwrap();
}
