//! The decisions of the loss scale against `torch.amp.GradScaler` (`make_loss_scale.py`).

use ft::engine::{LossScale, LossScaleConfig};

#[test]
fn the_loss_scale_decides_as_grad_scaler() {
    let cases: serde_json::Value = serde_json::from_str(include_str!("goldens/loss_scale.json")).unwrap();
    let cases = cases.as_array().unwrap();
    assert!(cases.len() >= 4);
    for case in cases {
        let mut scale = LossScale::new(LossScaleConfig {
            initial: case["initial"].as_f64().unwrap(),
            growth_interval: case["growth_interval"].as_u64().unwrap(),
        });
        let steps = case["steps"].as_array().unwrap();
        let mut skipped = 0;
        for step in steps {
            scale.update(step["overflow"].as_bool().unwrap()).unwrap();
            skipped += u64::from(!step["stepped"].as_bool().unwrap());
            assert_eq!(f64::from(scale.scale), step["scale"].as_f64().unwrap(), "{case}");
            assert_eq!(scale.steps, step["growth_tracker"].as_u64().unwrap(), "{case}");
            assert_eq!(scale.skipped, skipped, "{case}");
        }
        assert!(skipped > 0 && steps.len() > 2);
    }
}
