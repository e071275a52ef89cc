//! One target for each parser; `FT_FUZZ` names it. `FT_FUZZ=dict:TARGET` prints its dictionary. See fuzz/README.md.

#![no_main]

mod compressed;
mod limits;
mod mutate;
mod structure;

use std::sync::OnceLock;

/// The target, and the words of its dictionary.
fn chosen() -> &'static (ft_fuzz::Target, Vec<String>) {
    static CHOSEN: OnceLock<(ft_fuzz::Target, Vec<String>)> = OnceLock::new();
    CHOSEN.get_or_init(|| {
        let name = std::env::var("FT_FUZZ").unwrap_or_default();
        if let Some(target) = name.strip_prefix("dict:") {
            print!("{}", dictionary(target));
            std::process::exit(0);
        }
        match ft_fuzz::TARGETS.iter().find(|(n, _)| *n == name) {
            Some((_, target)) => (*target, ft_fuzz::words::words(&name)),
            None => {
                let names: Vec<&str> = ft_fuzz::TARGETS.iter().map(|(n, _)| *n).collect();
                eprintln!("FT_FUZZ={name:?} is none of: {}", names.join(" "));
                std::process::exit(2)
            }
        }
    })
}

/// The words as libFuzzer reads them with `-dict`: one a line, in quotes.
fn dictionary(target: &str) -> String {
    let mut out = String::new();
    for word in ft_fuzz::words::words(target) {
        out.push('"');
        for byte in word.bytes() {
            match byte {
                b'"' | b'\\' => out.extend(['\\', char::from(byte)]),
                b' '..=b'~' => out.push(char::from(byte)),
                _ => out.push_str(&format!("\\x{byte:02x}")),
            }
        }
        out.push_str("\"\n");
    }
    out
}

fn start() {
    // libFuzzer's hook ends the program at each panic, also at those of a library that ft turns into an error.
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        if !ft::base::is_caught() {
            hook(info);
        }
    }));
    chosen();
    limits::start();
}

/// A mutation that keeps the structure of the input. `None`: it has none that is known here.
fn mutated(bytes: &[u8], most: usize, seed: u32) -> Option<Vec<u8>> {
    let words = &chosen().1;
    structure::mutated(bytes, most, seed)
        .or_else(|| compressed::mutated(bytes, most, seed, words))
        .or_else(|| mutate::mutated(bytes, most, seed, words))
}

libfuzzer_sys::fuzz_target!(init: start(), |bytes| {
    limits::within(bytes.len(), || (chosen().0)(bytes));
});

// Each second mutation is libFuzzer's own: it knows the dictionary, and what the program compared.
libfuzzer_sys::fuzz_mutator!(|data: &mut [u8], size: usize, max_size: usize, seed: u32| {
    let own = (seed & 1 == 0).then(|| mutated(&data[..size], max_size, seed));
    match own.flatten() {
        Some(new) => {
            data[..new.len()].copy_from_slice(&new);
            new.len()
        }
        None => libfuzzer_sys::fuzzer_mutate(data, size, max_size),
    }
});
