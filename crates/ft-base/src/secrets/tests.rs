//! Tests of what is masked, and in which time.

use super::*;

/// `SECRET` in the text stands for the secret, and is `MASK` in the masked text.
fn masks(text: &str, secret: &str) {
    let (given, wanted) = (text.replace("SECRET", secret), text.replace("SECRET", MASK));
    assert_eq!(mask(&given), wanted, "{given}");
    // What is masked stays as it is.
    assert_eq!(mask(&wanted), wanted);
}

#[test]
fn values_after_names_are_masked_whole_and_their_quotes_stay() {
    for (text, secret) in [
        ("program:sh judge.sh --api-key SECRET --url x", "plain"),
        ("program:sh judge.sh --api-key=SECRET", "plain"),
        (
            r#"ft train 'rlhf.rewards=["program:sh judge.sh --api-key SECRET"]' train.seed=1"#,
            "plain",
        ),
        (r#"rewards = ["program:x --token SECRET", "length:2"]"#, "abc"),
        (r#"["--api-key", "SECRET", "--more"]"#, "abc"),
        ("model.hf_token=SECRET", "ARGSECRET"),
        ("HF_TOKEN=SECRET ft train r.toml", "abc"),
        ("# export OPENAI_API_KEY_2=SECRET\nb = 1", "abc"),
        (r#"{"api_key": "SECRET", "n": 1}"#, "abc"),
        ("apiKey = 'SECRET'", "a b,c"),
        ("password = \"\"\"SECRET\"\"\"", "two\nlines"),
        (r#"password = "SECRET" # x"#, r#"a\" b"#),
        ("secret: SECRET", "hunter22"),
        ("x --password SECRET", "caf\u{e9}\u{1f511}x"),
        (r#"program:x --password \"SECRET\" y"#, "two words"),
        (r"'sh -c '\''x --password SECRET'\'''", "abc"),
        ("'--password=SECRET' y", r"it'\''s"),
        ("--password 'SECRET' y", r"it'\''s"),
        ("curl -u SECRET https://h", "me:pw"),
        ("curl -H 'Authorization: Bearer SECRET' h", "abcdef123"),
        ("curl -H \"Authorization: Basic SECRET\" h", "bWU6cHc="),
        ("https://h/x?a=1&X-Amz-Signature=SECRET&b=2", "0123abcd"),
        ("https://h/x?key=SECRET&b=2", "abcdefgh"),
        ("-auth SECRET", "abc"),
    ] {
        masks(text, secret);
    }
}

#[test]
fn tokens_and_users_of_addresses_are_masked_by_their_form() {
    for (text, secret) in [
        ("judge SECRET, x", "sk-PLANTEDCMD0123456789"),
        ("the key SECRET.", "sk_PLANTEDCMD0123456789"),
        ("\"SECRET\"", "sk-proj-aB3_x-y9aB3_x-y9"),
        ("x=SECRET", "hf_planted0000000000000000"),
        ("(SECRET)", "ghp_0123456789abcdef0123456789abcdef"),
        ("SECRET", "eyJhbGciOiJIUzI1NiJ9.eyJzdWIi.c2ln"),
        ("train = \"https://SECRET@host/x.jsonl\"", "user:SECRETD"),
        ("https://SECRET@host:80/x?a=b@c", "me:p@s"),
        ("http://SECRET@host", "me:a/b"),
        ("https://SECRET@host", "abcdef"),
    ] {
        masks(text, secret);
        let given = text.replace("SECRET", secret);
        assert!(!mask_known(&given).contains(secret), "{given}");
    }
    assert_eq!(mask_known("api_key=plain"), "api_key=plain");
    let place = "https://SECRET@host/sk-PLANTEDCMD0123456789 sk-PLANTEDCMD0123456789";
    assert_eq!(
        mask_users(&place.replace("SECRET", "me:pw")),
        place.replace("SECRET", MASK)
    );
}

#[test]
fn words_of_recipes_and_commands_stay() {
    for text in [
        "rlhf.max_completion_length=5 data.max_tokens=20 --max-new-tokens 2",
        "eos_token = \"</s>\" prompt_key = \"question\" --answer-key text",
        "tokenizer=a key=value token = true use_auth_token: false",
        "the token: it is read from HF_TOKEN, see the key of the table",
        "program:python3 -u score.py --api-key-file k.txt --api-key $OPENAI_API_KEY",
        "train = [\"rows.jsonl\", \"org/name:a.jsonl\"] # sk-learn, hf_transfer, disk-Usage2024",
        "https://host:8080/a@b ssh://git@host/x http://[::1]:80/x@y",
        "learning_rate = 1e-3 regex:(?i)password",
        "hf_Model-7B-v2/x",
        "path = \"/models/hf_mistral7b\" train = \"data/wmt-en-sk-newstest2021.jsonl\"",
        "data/sk-europarl-newstest2021-train sk-europarl-newstest2021.jsonl ./hf_mistral7bInstructV02Long hf_mistral7bInstructV02Long/x",
        "docker run -u 1000:1000 --user 0:0 judge",
        "--token --resume",
    ] {
        assert_eq!(mask(text), text);
    }
}

#[test]
fn every_text_can_be_masked() {
    let parts = [
        "--api-key",
        "password",
        "=",
        ":",
        " ",
        "'",
        "\"",
        "\\",
        r"'\''",
        "\u{e9}",
        "\u{1f511}",
        "\n",
        ",",
        "://",
        "@",
        "a1",
        "sk-",
        "Bearer ",
        "?key=",
        "<",
    ];
    let mut state = 1u64;
    for _ in 0..20_000 {
        let mut text = String::new();
        for _ in 0..12 {
            state = state
                .wrapping_mul(6364136223846793005)
                .wrapping_add(1442695040888963407);
            text.push_str(parts[(state >> 33) as usize % parts.len()]);
        }
        let (masked, _) = (
            mask(&text),
            (mask_known(&text), bare_address(&text), is_variable("X", &text)),
        );
        assert!(masked.is_empty() == text.is_empty());
    }
}

#[test]
fn an_address_is_shown_without_user_password_and_query() {
    for (url, shown) in [
        ("https://me:s3cretpw@mirror.example", "https://mirror.example"),
        (
            "https://me:a?b/c@mirror.example/x?token=y#z",
            "https://mirror.example/x",
        ),
        ("me:pw@mirror.example", "mirror.example"),
        ("http://127.0.0.1:80/sub", "http://127.0.0.1:80/sub"),
        ("https://mirror.example/?key=x", "https://mirror.example"),
        ("no url", "no url"),
        ("https://h.example/@me/hf", "https://h.example/@me/hf"),
        ("https://h.example:8080/@me/hf/", "https://h.example:8080/@me/hf"),
        ("https://me:pw@h.example/@me/hf", "https://h.example/@me/hf"),
        ("http://[::1]:80/@me", "http://[::1]:80/@me"),
    ] {
        assert_eq!(bare_address(url), shown);
    }
}

#[test]
fn variables_with_secrets_are_known_by_name_or_value() {
    for name in [
        "HF_TOKEN",
        "aws_secret_access_key",
        "AWS_ACCESS_KEY_ID",
        "SERVICE_API_KEY",
        "OPENAI_API_KEY_2",
        "PGPASSWORD",
        "MYSQL_PWD",
        "DB_PASS",
        "GITHUB_TOKENS",
        "SERVICE_JSON_KEY",
        "SERVICE_PRIMARY_KEY_2",
        "MAX_API_KEY",
        "GOOGLE_APPLICATION_CREDENTIALS",
        "SSH_AUTH_SOCK",
        "DBUS_SESSION_BUS_ADDRESS",
        "DOCKER_HOST",
        JOB,
    ] {
        assert!(is_variable(name, "x"), "{name}");
    }
    for value in [
        "postgres://me:pw@db/x",
        "http://me:p/w@proxy:3128",
        "https://abc@h",
        "hf_abcDEF01234567890123456789",
    ] {
        assert!(is_variable("PLAIN", value), "{value}");
    }
    for (name, value) in [
        ("PATH", "/usr/bin:/opt/sk-Tools2024/bin"),
        ("HOME", "/root"),
        ("PWD", "/tmp"),
        ("OLDPWD", "/tmp"),
        ("KEYBOARD", "us"),
        ("PYTHONPATH", "lib"),
        ("XAUTHORITY", "cookies"),
        ("TOKENIZERS_PARALLELISM", "false"),
        ("HTTPS_PROXY", "http://proxy:3128"),
        ("SSH_ASKPASS", "/usr/bin/ask"),
        ("EMPTY", ""),
        ("MAX_TOKENS", "512"),
        ("JUDGE_MAX_NEW_TOKENS", "5"),
        ("MAX_INPUT_TOKENS", "4096"),
        ("EOS_TOKEN", "</s>"),
        ("CACHE_KEY", "abc"),
        ("MODEL", "/models/hf_mistral7bInstructV02Long"),
    ] {
        assert!(!is_variable(name, value), "{name}");
    }
}

/// A run directory may come from somebody else, and `ft runs` and `ft dash` mask its texts.
#[test]
fn the_time_grows_with_the_length_only() {
    const LENGTH: usize = 1 << 20;
    let repeated = |part: &str| part.repeat(LENGTH / part.len());
    let mut texts: Vec<String> = [
        "sk-sk-",
        "a=a=a=",
        "://x://x",
        "://x:y",
        "\\",
        "key=key=",
        "token:",
        "?key=",
        "password=<",
        "token=\\'",
        "--token \"a\" ",
        "token='a'\\''",
        "bearer ",
    ]
    .map(repeated)
    .into();
    texts.push("token=x".to_string() + &"\\".repeat(LENGTH));
    let half = LENGTH / 2;
    texts.push("key=".repeat(half / 4) + &")".repeat(half));
    texts.push("?key=key=".repeat(half / 9) + &")".repeat(half / 2) + "&" + &")".repeat(half / 2));
    texts.push("password=<".repeat(half / 10) + &">".repeat(half));
    texts.push("://a:b".repeat(half / 6) + &"@".repeat(half));
    texts.push((1..1400).rev().map(|n| format!("token={}\"", "\\".repeat(n))).collect());
    // If the time grew with the square of the length, it would be minutes.
    let limit = std::time::Duration::from_secs(if cfg!(debug_assertions) { 20 } else { 2 });
    for text in texts {
        let start = std::time::Instant::now();
        let masked = (mask(&text).len(), bare_address(&text).len(), is_variable("X", &text));
        let taken = start.elapsed();
        assert!(taken < limit, "{taken:?} {masked:?} {}", &text[..20]);
    }
}
