//! `quadriga plan --instance`: what it reports, and how it refuses files that it cannot read.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use quadriga::plan_instance::{EffortName, PlanInstance, parse, plan_instance, run};
use std::io::Write;

fn file(text: &str) -> tempfile::NamedTempFile {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(text.as_bytes()).unwrap();
    file
}

const SMALL: &str = "id,lower,upper,size\n0,0,2,4\n1,1,3,8\n\n2,2,4,4\n";

#[test]
fn reports_the_peak_as_lines_and_as_json() {
    let file = file(SMALL);
    let mut asked =
        PlanInstance { instance: file.path().into(), capacity: Some(11), ..PlanInstance::default() };
    for effort in [EffortName::Fast, EffortName::Search, EffortName::Exact] {
        asked.effort = effort;
        let report = plan_instance(&asked).unwrap();
        assert_eq!((report.n, report.lower_bound, report.peak, report.ratio), (3, 12, 12, 1.0));
        assert_eq!((report.proved_optimal, report.capacity, report.fits), (true, Some(11), Some(false)));
    }
    let text = run(&asked).unwrap();
    assert!(text.contains("peak           12\n") && text.contains("fits           false\n"), "{text}");
    asked.json = true;
    asked.capacity = None;
    let json: serde_json::Value = serde_json::from_str(&run(&asked).unwrap()).unwrap();
    assert_eq!(json["peak"], 12);
    assert_eq!(json["proved_optimal"], true);
    assert!(json.get("fits").is_none());
}

#[test]
fn columns_may_come_in_any_order() {
    let items = parse("size, upper,name,lower\n7,5,x,3\n").unwrap();
    assert_eq!((items[0].size, items[0].start, items[0].end), (7, 3, 5));
}

#[test]
fn mistakes_are_named_with_line_and_column() {
    let refuse = |text: &str| {
        let file = file(text);
        let asked = PlanInstance { instance: file.path().into(), ..PlanInstance::default() };
        plan_instance(&asked).unwrap_err().to_string()
    };
    assert!(refuse("id,lower,size\n").contains("line 1: no column `upper`"));
    assert!(refuse("").contains("no column `lower`"));
    assert!(refuse("id,lower,upper,size\n0,0,1,8\n1,0,x,8\n").starts_with("line 3, column `upper`: `x`"));
    assert!(refuse("id,lower,upper,size\n0,0,1\n").starts_with("line 2, column `size`: missing"));
    assert!(refuse("id,lower,upper,size\n0,0,1,-8\n").starts_with("line 2, column `size`: `-8`"));
    assert!(refuse("id,lower,upper,size\n0,0,5000000000,8\n").contains("line 2, column `upper`"));
    assert!(refuse("id,lower,upper,size\n\n0,0,1,8\n1,4,4,8\n").starts_with("line 4: item 1"));
    assert!(refuse("id,lower,upper,size\n0,0,1,18446744073709551615\n").starts_with("line 2: item 0"));
    let asked = PlanInstance { instance: "no/such/file".into(), ..PlanInstance::default() };
    assert!(plan_instance(&asked).unwrap_err().to_string().starts_with("cannot read no/such/file"));
}
