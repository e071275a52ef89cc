//! What a hub may not do: write and remove files outside the cache, or see a token; and plans of cached models.

use super::*;

/// A model in the cache is planned as the same files in a directory: its tokenizer and its weights are found.
#[test]
fn a_cached_model_is_planned_like_its_directory() {
    let (hub, cache) = (Hub::start(), tempfile::tempdir().unwrap());
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let files = std::fs::read_dir(root.join("assets/tiny")).unwrap().map(|entry| {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        (name, std::fs::read(path).unwrap())
    });
    hub.put(&format!("models/{ID}"), files.collect());
    resolve_with(&hub.settings(cache.path()), ID, "main").unwrap();
    let recipe = cache.path().join("r.toml");
    let rows = root.join("assets/world/train.jsonl");
    let text = format!(
        "[model]\npath = \"{ID}\"\ndtype = \"f32\"\n[data]\ntrain = \"{}\"\nmax_length = 256\n\
         [tune]\nmethod = \"lora\"\n[memory]\nfrozen_weights = \"int8\"\nbudget = \"4GiB\"\n",
        rows.display()
    );
    std::fs::write(&recipe, text).unwrap();
    let ft = |arguments: &[&str]| {
        let out = std::process::Command::new(env!("CARGO_BIN_EXE_ft"))
            .args(arguments)
            .current_dir(cache.path())
            .env("HF_HUB_CACHE", cache.path())
            .env("HF_HUB_OFFLINE", "1")
            .output()
            .unwrap();
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
        out
    };
    let of = |more: &[&str]| -> Value {
        let out = ft(&[&["plan", "--recipe", "r.toml", "--json"], more].concat());
        let said = String::from_utf8_lossy(&out.stderr).into_owned();
        assert!(!said.contains("rows are not here"), "{said}");
        serde_json::from_slice(&out.stdout).unwrap()
    };
    // What the program itself takes differs from start to start.
    let own = |plan: &Value| plan["peak_bytes"].as_u64().unwrap() - plan["process"].as_u64().unwrap();
    let directory = format!("model.path={}", root.join("assets/tiny").display());
    let (cached, local) = (of(&[]), of(&[&directory]));
    let parts = [
        "weights",
        "layer_work",
        "logits",
        "scratch",
        "adapters",
        "optimizer",
        "data",
    ];
    for part in parts {
        assert_eq!(cached[part], local[part], "{part}");
    }
    assert_eq!(own(&cached), own(&local));
    // And a run plans the same.
    let out = "train.output_dir=run";
    ft(&["train", "--recipe", "r.toml", "train.max_steps=1", out]);
    let text = std::fs::read_to_string(cache.path().join("run/plan.json")).unwrap();
    let run: Value = serde_json::from_str(&text).unwrap();
    let short = of(&["train.max_steps=1", out]);
    for part in parts {
        assert_eq!(short[part], run[part], "{part}");
    }
}

/// Every path below `dir`, links as links, with the contents of files.
fn everything(dir: &Path) -> BTreeMap<String, String> {
    let mut out = BTreeMap::new();
    let mut open = vec![dir.to_path_buf()];
    while let Some(next) = open.pop() {
        for entry in std::fs::read_dir(next).unwrap() {
            let path = entry.unwrap().path();
            let name = path.strip_prefix(dir).unwrap().to_string_lossy().into_owned();
            let metadata = path.symlink_metadata().unwrap();
            let what = match () {
                _ if metadata.is_symlink() => format!("link to {}", path.read_link().unwrap().display()),
                _ if metadata.is_dir() => {
                    open.push(path);
                    "directory".to_string()
                }
                _ => format!("file {:?}", std::fs::read(&path).unwrap()),
            };
            out.insert(name, what);
        }
    }
    out
}

#[test]
fn a_lying_hub_writes_and_removes_nothing_outside_the_cache() {
    let long = "a".repeat(20_000);
    let nul = format!("{}\u{0}/../../x", "a".repeat(40));
    let names: Vec<String> = [
        "../../../../victim/keep.txt",
        "../../../../victim/new.txt",
        "../../../victim",
        "..",
        ".",
        "",
        "/etc/hostname",
        "VICTIM",
        "..\\..\\victim",
        "%2e%2e%2fvictim",
        "~/victim",
        &long,
        &nul,
        "main",
        "0123456789abcdef0123456789abcdef0123456g",
        "0123456789ABCDEF0123456789ABCDEF01234567",
    ]
    .map(str::to_string)
    .to_vec();
    let lie = |make: fn(String) -> Lies| names.iter().cloned().map(make);
    let mut lies: Vec<(Lies, bool)> = Vec::new();
    for lists in [true, false] {
        lies.extend(
            lie(|name| Lies {
                commit: Some(name),
                ..Lies::default()
            })
            .map(|l| (l, lists)),
        );
        lies.extend(
            lie(|name| Lies {
                tag: Some(name),
                ..Lies::default()
            })
            .map(|l| (l, lists)),
        );
        for size in [0, 1, 10, 1 << 40, u64::MAX] {
            let size = Some(size);
            lies.push((
                Lies {
                    size,
                    ..Lies::default()
                },
                lists,
            ));
        }
        let endless = true;
        lies.push((
            Lies {
                endless,
                ..Lies::default()
            },
            lists,
        ));
        for to in [
            "file:///etc/hostname",
            "/resolve",
            "http://",
            "gopher://x/",
            "..",
            "http://a@127.0.0.1/x",
            "ftp://x",
        ] {
            let location = Some(to.to_string());
            lies.push((
                Lies {
                    location,
                    ..Lies::default()
                },
                lists,
            ));
        }
    }
    lies.extend(
        lie(|name| Lies {
            oid: Some(name),
            ..Lies::default()
        })
        .map(|l| (l, true)),
    );
    lies.extend(
        lie(|name| Lies {
            path: Some(name),
            ..Lies::default()
        })
        .map(|l| (l, true)),
    );
    let hub = Hub::with_model();
    let mut served = 0;
    for (lies, lists) in lies {
        let place = tempfile::tempdir().unwrap();
        // Where `../../../../victim` of a blob, a link and a lock would be.
        for depth in ["", "a", "a/b", "a/b/c"] {
            let victim = place.path().join(depth).join("victim");
            std::fs::create_dir_all(&victim).unwrap();
            std::fs::write(victim.join("keep.txt"), "mine").unwrap();
        }
        let cache = place.path().join("a/b/c/cache");
        std::fs::create_dir(&cache).unwrap();
        let outside = || {
            let all = everything(place.path()).into_iter();
            all.filter(|(name, _)| !name.starts_with("a/b/c/cache/"))
                .collect::<Vec<_>>()
        };
        let before = outside();
        {
            let mut state = hub.state();
            (state.lies, state.lists) = (lies.clone(), lists);
        }
        let mut settings = hub.settings(&cache);
        settings.attempts = 1;
        let found = resolve_with(&settings, ID, "main");
        assert_eq!(outside(), before, "{:?} {:?} {:?}", lies.commit, lies.tag, lies.oid);
        // Whatever came is what the hub has, whole and in its place.
        for (name, what) in everything(&cache) {
            let inside = [
                "models--tester--tiny-model/blobs",
                "models--tester--tiny-model/snapshots",
                "models--tester--tiny-model/refs",
            ];
            assert!(
                name == "models--tester--tiny-model" || inside.iter().any(|i| name.starts_with(i)),
                "{name}"
            );
            if let Some(target) = what.strip_prefix("link to ") {
                let blob = target.trim_start_matches("../").strip_prefix("blobs/").unwrap();
                assert!(
                    blob.len() >= 40 && blob.bytes().all(|b| b.is_ascii_hexdigit()),
                    "{target}"
                );
            }
        }
        if let Ok(dir) = found {
            assert_eq!(dir, cache.join("models--tester--tiny-model/snapshots").join(COMMIT));
            loads(&dir);
            served += 1;
        }
    }
    // Tags do not matter where the hub lists its files, nor do names that are left out of the list.
    assert!(served > 20, "{served}");
}

#[test]
fn a_redirect_to_another_host_gets_no_token() {
    let (hub, other) = (Hub::with_model(), Hub::with_model());
    other.state().lists = false;
    let cache = tempfile::tempdir().unwrap();
    let mut settings = hub.settings(cache.path());
    settings.token = Some("hf_secret".into());
    // The files are on another server: no token goes there, the files are fetched and checked.
    let redirect = |file: &str| format!("{}/{ID}/resolve/{COMMIT}/{file}", other.address);
    hub.put(
        &format!("models/{ID}"),
        BTreeMap::from([("config.json".into(), model()["config.json"].clone())]),
    );
    hub.state().lies.location = Some(redirect("config.json"));
    let e = resolve_with(&settings, ID, "main").unwrap_err().to_string();
    assert!(e.contains("no `model.safetensors`"), "{e}");
    assert!(hub.state().tokens > 0);
    assert_eq!(other.state().tokens, 0);
    assert!(other.state().log.iter().any(|(method, ..)| method == "GET"));
    // What comes from there is damaged: nothing of it stays.
    let cache = tempfile::tempdir().unwrap();
    settings.cache = cache.path().to_path_buf();
    other.state().damages = Some("config.json".into());
    let e = resolve_with(&settings, ID, "main").unwrap_err().to_string();
    assert!(e.contains("damaged on the way"), "{e}");
    // An address without encryption, and a token: refused before anything is sent.
    settings.endpoint = "http://hub.invalid".into();
    let e = resolve_with(&settings, ID, "main").unwrap_err();
    assert_eq!(e.exit_code(), 2);
    assert!(
        e.to_string().contains("unencrypted") && !e.to_string().contains("hf_secret"),
        "{e}"
    );
}
