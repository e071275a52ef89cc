//! Plans of shapes: times, shipped models, GPUs that this machine does not have.

use super::*;
use crate::plan::gpu_time::GPUS;

#[test]
fn shipped_models_have_shapes() {
    for (path, shape) in [
        ("assets/small", "shape:tiny-student"),
        ("assets/moe", "shape:tiny-moe"),
        ("runs/grpo-start/final", "shape:tiny"),
    ] {
        assert_eq!(shape_of(&path.into()), ModelRef::Shape(shape.into()));
    }
}

fn recipe(text: &str) -> Recipe {
    let text = format!("[data]\ntrain = \"-\"\nmax_length = 2048\n{text}");
    crate::recipe::parse(&text, "test", &[]).unwrap().recipe
}

fn of_step(shape: &str, tune: &str, rows: usize, memory: &str) -> Recipe {
    recipe(&format!(
        "packing = false\n[model]\npath = \"shape:{shape}\"\ndtype = \"bf16\"\n[tune]\n{tune}\n[train]\n\
         batch_size = {rows}\ngradient_accumulation_steps = 1\nmax_grad_norm = 0.0\n[memory]\n{memory}\n"
    ))
}

fn like_h100(recipe: &Recipe) -> StepTime {
    plan(recipe, Some(&GPUS[0])).unwrap().time.unwrap().time.unwrap()
}

/// Steps of docs/benchmarks-gpu.md, measured on an H100 with 2048 tokens a row and saved activations.
#[test]
fn the_estimated_time_is_near_the_measured_one() {
    let measured = [
        ("llama-3.1-8b", "lora", 1, 15_103.0),
        ("llama-3.1-8b", "block", 1, 21_749.0),
        ("qwen2.5-0.5b", "lora", 8, 123_467.0),
        ("qwen2.5-0.5b", "lora", 1, 69_306.0),
        ("qwen2.5-0.5b", "full", 8, 105_635.0),
    ];
    for (shape, method, rows, tokens_per_second) in measured {
        let tune = format!("method = \"{method}\"");
        let time = like_h100(&of_step(
            shape,
            &tune,
            rows,
            "activations = \"keep\"\ntier = \"device\"",
        ));
        let ratio = tokens_per_second / time.tokens_per_second();
        assert!(
            (0.9..1.1).contains(&ratio),
            "{shape} {method} {rows}: {ratio:.3} {time:?}"
        );
    }
}

/// The last layer of an 8B model in 8 GiB: 7 900 tokens/s, with the weights in host memory.
#[test]
fn copies_of_weights_take_the_measured_time() {
    let last = of_step(
        "llama-3.1-8b",
        "method = \"freeze\"\nfreeze = { trainable_layers = 1 }",
        1,
        "budget = \"8GiB\"\nhost_budget = \"100GiB\"",
    );
    let time = like_h100(&last);
    let ratio = 7_900.0 / time.tokens_per_second();
    assert!((0.9..1.1).contains(&ratio), "{ratio:.3} {time:?}");
    assert_eq!(time.limit(), "copies of weights");
}

/// Of four micro-batches each of two ranks computes two; three ranks need two rounds too.
#[test]
fn a_step_takes_the_time_of_the_rounds() {
    let mut recipe = of_step("qwen2.5-0.5b", "method = \"lora\"", 8, "tier = \"device\"");
    recipe.train.gradient_accumulation_steps = 4;
    let seconds = |ranks| {
        let planned = plan_for(&recipe, Some(&GPUS[0]), ranks, 1).unwrap();
        planned.time.unwrap().time.unwrap().seconds()
    };
    let (one, two, three) = (seconds(1), seconds(2), seconds(3));
    assert!(
        (one / two - 2.0).abs() < 0.02 && (two / three - 1.0).abs() < 0.02,
        "{one} {two} {three}"
    );
}

/// Of fewer adapted linears fewer pairs are computed; other adapters and f32 have no known time.
#[test]
fn the_time_counts_the_adapters_of_the_run() {
    let lora = |keys: &str| {
        of_step(
            "qwen2.5-0.5b",
            &format!("method = \"lora\"\nlora = {{ {keys} }}"),
            8,
            "tier = \"device\"",
        )
    };
    let adapters = |keys: &str| {
        let time = like_h100(&lora(keys));
        time.parts().find(|(name, _)| *name == "adapters").unwrap().1
    };
    let (all, some) = (
        adapters("r = 16"),
        adapters("target_modules = [\"q_proj\", \"v_proj\"]"),
    );
    let few = adapters("layers_to_transform = [22, 23]");
    assert!(some < all / 3.0 && few < all / 10.0 && few > 0.0, "{all} {some} {few}");
    for (keys, dtype) in [
        ("use_dora = true", "bf16"),
        ("peft_type = \"oft\"", "bf16"),
        ("r = 16", "f32"),
    ] {
        let mut recipe = lora(keys);
        recipe.model.dtype = crate::recipe::Dtype::parse(dtype).unwrap();
        let planned = plan(&recipe, Some(&GPUS[0])).unwrap();
        assert!(planned.json()["time"].is_null());
        let text = planned.time.unwrap().text();
        assert!(text.starts_with("time like h100: not known for "), "{text}");
    }
}

/// The planner also takes the disk with enough memory for the weights, to save more activations.
#[test]
fn the_reason_for_the_disk_is_the_true_one() {
    let why = |budget: &str| {
        let memory = format!("budget = \"{budget}\"");
        let mut recipe = of_step("qwen3-4b", "method = \"lora\"", 1, &memory);
        recipe.model.device = DeviceRef::new("cpu");
        let planned = plan(&recipe, None).unwrap();
        let choice = planned.plan.choices.iter().find(|c| c.key == Memory::tier).unwrap();
        (choice.value.clone(), choice.why.clone())
    };
    let (tier, reason) = why("8GiB");
    assert!(
        tier == "disk" && reason.starts_with("all weights in memory: at least 8."),
        "{reason}"
    );
    let (tier, reason) = why("12GiB");
    let faster = reason.contains("less memory for saved activations");
    assert!((tier == "disk") == faster, "{tier}: {reason}");
}

/// The smaller of both is the limit; the text has no empty list of parts.
#[test]
fn the_budget_is_that_of_the_recipe_and_of_the_gpu() {
    let planned = |budget: &str| {
        let recipe = of_step(
            "qwen2.5-0.5b",
            "method = \"lora\"",
            1,
            &format!("budget = \"{budget}\""),
        );
        plan(&recipe, GPUS.iter().find(|gpu| gpu.name == "4090")).unwrap()
    };
    assert!(planned("4GiB").verdict.text.contains("of a budget of 4.0 GiB"));
    let above = planned("40GiB");
    assert!(
        above.verdict.text.contains("of a budget of 23.0 GiB"),
        "{}",
        above.verdict.text
    );
    assert!(above.notes.iter().any(|note| note.contains("`memory.host_budget`")));
    let (gpu, time) = (&GPUS[0], Ok(StepTime::default()));
    let text = GpuEstimate { gpu, time }.text();
    assert!(!text.contains("()") && text.contains("limited by"), "{text}");
}

/// The storage follows from the products; a GPU without the type is refused.
#[test]
fn products_in_8_bits_are_faster_and_take_less_memory() {
    let of = |products: &str| {
        let memory = format!("activations = \"keep\"\nfrozen_products = \"{products}\"");
        of_step("llama-3.1-8b", "method = \"lora\"", 4, &memory)
    };
    let on = |products: &str, gpu: &str| plan(&of(products), GPUS.iter().find(|g| g.name == gpu));
    for (products, gpu) in [("int8", "h100"), ("int8", "a100"), ("fp8", "h100")] {
        let (exact, with) = (on("dequantized", gpu).unwrap(), on(products, gpu).unwrap());
        let seconds = |plan: &RecipePlan| plan.time.as_ref().unwrap().time.as_ref().unwrap().seconds();
        assert!(seconds(&with) < 0.9 * seconds(&exact), "{products} {gpu}");
        assert!(with.plan.peak_bytes < exact.plan.peak_bytes, "{products} {gpu}");
        let text = with.json().to_string();
        assert!(text.contains(&format!("their products in {products}")), "{text}");
    }
    let refused = on("fp8", "a100").err().unwrap().to_string();
    assert!(refused.contains("a100") && refused.contains("8.9"), "{refused}");
}

#[test]
fn a_gpu_sets_the_budget_and_a_slower_one_takes_longer() {
    let recipe = recipe(
        "[model]\npath = \"shape:llama-3.1-8b\"\ndtype = \"bf16\"\n[tune]\nmethod = \"block\"\n[train]\nbatch_size = 1\n",
    );
    let seconds: Vec<f64> = GPUS
        .iter()
        .map(|gpu| {
            let planned = plan(&recipe, Some(gpu)).unwrap();
            assert!(planned.plan.peak_bytes <= gpu.memory, "{}", gpu.name);
            planned.time.unwrap().time.unwrap().seconds()
        })
        .collect();
    assert!(
        seconds[1] <= seconds[0] && seconds[0] < seconds[2] && seconds[2] < seconds[3],
        "{seconds:?}"
    );
    assert!(seconds[3] < seconds[4], "{seconds:?}");
}
