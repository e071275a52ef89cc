//! A browser without a window, controlled over the DevTools protocol: messages in JSON on two pipes, each ended by a zero
//! byte.

use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

/// The same program; the first has no window at all and needs fewer packages.
const PROGRAMS: [&str; 4] = [
    "chromium-headless-shell",
    "chromium",
    "chromium-browser",
    "google-chrome",
];
/// A busy machine is slow.
const PATIENCE: Duration = Duration::from_secs(60);

pub struct Browser {
    child: Child,
    to: ChildStdin,
    from: Receiver<Value>,
    session: String,
    sent: u64,
    /// The faults of the page: errors of scripts, of the console, of requests and of the policy for its content.
    faults: Vec<String>,
    /// The addresses that the page asked for.
    pub asked: Vec<String>,
}

fn program() -> &'static str {
    let path = std::env::var_os("PATH").unwrap();
    let is_there = |name: &&str| std::env::split_paths(&path).any(|dir| dir.join(name).is_file());
    PROGRAMS.into_iter().find(is_there).expect("a Chromium in PATH")
}

impl Browser {
    /// Starts the browser with an empty profile in `home`, and one empty page.
    pub fn start(home: &Path) -> Self {
        // The protocol is on the descriptors 3 and 4. The pages are those of ft: as root, and in most containers, the browser
        // does not start with its own walls.
        let line = format!(
            "exec {} --headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking \
             --remote-debugging-pipe --user-data-dir=\"$0\" 3<&0 4>&1 < /dev/null > \"$0.log\" 2>&1",
            program()
        );
        let mut child = Command::new("sh")
            .args(["-c", &line])
            .arg(home.join("profile"))
            .env("HOME", home)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (sender, from) = channel();
        let reader = BufReader::new(child.stdout.take().unwrap());
        std::thread::spawn(move || {
            for message in reader.split(0).map_while(Result::ok) {
                if sender.send(serde_json::from_slice(&message).unwrap()).is_err() {
                    break;
                }
            }
        });
        let mut browser = Self {
            to: child.stdin.take().unwrap(),
            child,
            from,
            session: String::new(),
            sent: 0,
            faults: Vec::new(),
            asked: Vec::new(),
        };
        let target = browser.call("Target.createTarget", json!({"url": "about:blank"}));
        let attach = json!({"targetId": target["targetId"], "flatten": true});
        let session = browser.call("Target.attachToTarget", attach);
        browser.session = session["sessionId"].as_str().unwrap().to_string();
        for domain in ["Page", "Runtime", "Log", "Network"] {
            browser.call(&format!("{domain}.enable"), json!({}));
        }
        browser
    }

    /// One command; its result.
    fn call(&mut self, method: &str, parameters: Value) -> Value {
        self.sent += 1;
        let id = self.sent;
        let mut message = json!({"id": id, "method": method, "params": parameters});
        if !self.session.is_empty() {
            message["sessionId"] = json!(self.session);
        }
        self.to.write_all(format!("{message}\0").as_bytes()).unwrap();
        self.to.flush().unwrap();
        let end = Instant::now() + PATIENCE;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            let answer = self.from.recv_timeout(left);
            let answer = answer.unwrap_or_else(|e| panic!("{method}: {e}; {:?}", self.faults));
            if answer["id"] == id {
                assert!(answer["error"].is_null(), "{method}: {answer}");
                return answer["result"].clone();
            }
            self.note(&answer);
        }
    }

    fn note(&mut self, event: &Value) {
        let of = &event["params"];
        let fault = match event["method"].as_str().unwrap_or("") {
            "Runtime.exceptionThrown" => &of["exceptionDetails"],
            "Runtime.consoleAPICalled" if of["type"] == "error" || of["type"] == "warning" => &of["args"],
            "Log.entryAdded" if of["entry"]["level"] == "error" => &of["entry"],
            "Page.javascriptDialogOpening" => of,
            "Network.requestWillBeSent" => {
                let url = of["request"]["url"].as_str().unwrap();
                self.asked.push(url.to_string());
                return;
            }
            _ => return,
        };
        self.faults.push(fault.to_string());
    }

    /// The faults of the page since the last call.
    pub fn faults(&mut self) -> Vec<String> {
        // An answer comes after all events before it.
        self.run("0");
        std::mem::take(&mut self.faults)
    }

    pub fn open(&mut self, url: &str) {
        let opened = self.call("Page.navigate", json!({"url": url}));
        assert!(opened["errorText"].is_null(), "{url}: {opened}");
    }

    /// The value of an expression in the page.
    pub fn run(&mut self, expression: &str) -> Value {
        let asked = json!({"expression": expression, "returnByValue": true, "awaitPromise": true});
        let said = self.call("Runtime.evaluate", asked);
        assert!(said["exceptionDetails"].is_null(), "{expression}: {said}");
        said["result"]["value"].clone()
    }

    /// Waits until an expression is true. The elements that it names need not be there before.
    pub fn until(&mut self, expression: &str) {
        let end = Instant::now() + PATIENCE;
        let asked = format!("(() => {{ try {{ return Boolean({expression}); }} catch {{ return false; }} }})()");
        while self.run(&asked) != true {
            if Instant::now() > end {
                let seen = self.run("document.body.innerText");
                panic!("never true: {expression}; {:?}; {seen}", self.faults);
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// The size of the window in CSS pixels.
    pub fn size(&mut self, width: u32, height: u32) {
        let size = json!({"width": width, "height": height, "deviceScaleFactor": 1, "mobile": false});
        self.call("Emulation.setDeviceMetricsOverride", size);
    }

    /// Sets the preference of the system: `light` or `dark`.
    pub fn prefer(&mut self, scheme: &str) {
        let features = json!({"features": [{"name": "prefers-color-scheme", "value": scheme}]});
        self.call("Emulation.setEmulatedMedia", features);
    }

    /// Presses and releases a key.
    pub fn press(&mut self, key: &str) {
        let (text, code) = match key {
            "Tab" => ("", 9),
            "Enter" => ("\r", 13),
            " " => (" ", 32),
            "PageUp" => ("", 33),
            "End" => ("", 35),
            "Home" => ("", 36),
            "ArrowLeft" => ("", 37),
            "ArrowRight" => ("", 39),
            _ => panic!("{key}"),
        };
        let event =
            |kind: &str, text: &str| json!({"type": kind, "key": key, "windowsVirtualKeyCode": code, "text": text});
        let down = if text.is_empty() { "rawKeyDown" } else { "keyDown" };
        self.call("Input.dispatchKeyEvent", event(down, text));
        self.call("Input.dispatchKeyEvent", event("keyUp", ""));
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        // Its other processes end with it.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
