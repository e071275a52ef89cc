//! One target for each parser; `FT_FUZZ` names it. See fuzz/README.md.

#![no_main]

use std::sync::OnceLock;

fn target() -> ft_fuzz::Target {
    static TARGET: OnceLock<ft_fuzz::Target> = OnceLock::new();
    *TARGET.get_or_init(|| {
        // libFuzzer's hook ends the program at each panic, also at those of a library that ft turns into an error.
        let hook = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            if !ft::base::is_caught() {
                hook(info);
            }
        }));
        let name = std::env::var("FT_FUZZ").unwrap_or_default();
        match ft_fuzz::TARGETS.iter().find(|(n, _)| *n == name) {
            Some((_, target)) => *target,
            None => {
                let names: Vec<&str> = ft_fuzz::TARGETS.iter().map(|(n, _)| *n).collect();
                eprintln!("FT_FUZZ={name:?} is none of: {}", names.join(" "));
                std::process::exit(2)
            }
        }
    })
}

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    target()(bytes);
});
