//! False answers of a hostile hub: nothing outside of the cache may be written or removed.

use super::{COMMIT, Hub, ID, Lies, loads, model};
use ft::hub::resolve_with;
use std::collections::BTreeMap;
use std::path::Path;

/// Every path below `dir`: links with their targets, files with their contents.
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

/// Row W5.
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
        // The places where `../../../../victim` of a blob, a link and a lock would be.
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
        // Every file in the cache is complete and in its place.
        for (name, what) in everything(&cache) {
            let inside = [
                "models--tester--tiny-model/blobs",
                "models--tester--tiny-model/snapshots",
                "models--tester--tiny-model/refs",
            ];
            let list = format!("models--tester--tiny-model/lists/{COMMIT}.json");
            assert!(
                list.starts_with(&name) || inside.iter().any(|i| name.starts_with(i)),
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
    // Wrong tags have no effect if the hub lists its files, nor have names that are missing in the list.
    assert!(served > 20, "{served}");
}

/// Row W5.
#[test]
fn a_redirect_to_another_host_gets_no_token() {
    let (hub, other) = (Hub::with_model(), Hub::with_model());
    other.state().lists = false;
    let cache = tempfile::tempdir().unwrap();
    let mut settings = hub.settings(cache.path());
    settings.token = Some("hf_secret".into());
    // The files are on another server: it gets no token, and the files are downloaded and verified.
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
    // The other server sends damaged data: nothing of it stays.
    let cache = tempfile::tempdir().unwrap();
    settings.cache = cache.path().to_path_buf();
    other.state().damages = Some("config.json".into());
    let e = resolve_with(&settings, ID, "main").unwrap_err().to_string();
    assert!(e.contains("damaged during the download"), "{e}");
    // An address without encryption and a token: refused before any request.
    settings.endpoint = "http://hub.invalid".into();
    let e = resolve_with(&settings, ID, "main").unwrap_err();
    assert_eq!(e.exit_code(), 2);
    assert!(
        e.to_string().contains("unencrypted") && !e.to_string().contains("hf_secret"),
        "{e}"
    );
}

/// Row W5.
#[test]
fn a_file_list_that_leads_in_a_circle_or_to_another_host_is_refused() {
    let (hub, other) = (Hub::with_model(), Hub::with_model());
    let cache = tempfile::tempdir().unwrap();
    let page = format!("/api/models/{ID}/tree/{COMMIT}?cursor=2");
    let elsewhere = format!("{}{page}", other.address);
    for (next, words, pages) in [(page, "an earlier page", 2), (elsewhere, "at another address", 1)] {
        hub.state().lies.next = Some(next);
        let e = resolve_with(&hub.settings(cache.path()), ID, "main")
            .unwrap_err()
            .to_string();
        assert!(
            e.contains("the hub sent an invalid response") && e.contains(words),
            "{e}"
        );
        let log = std::mem::take(&mut hub.state().log);
        let asked = log.iter().filter(|(_, path, _)| path.contains("/tree/"));
        assert_eq!(asked.count(), pages, "{log:?}");
    }
    assert!(other.state().log.is_empty());
}
