//! Ranks that meet, each on a thread.

use super::super::greeting::SHORT;
use super::*;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

/// A port that is free now, below those that the system gives to connections of tests beside this one.
pub(in crate::comm) fn free_port() -> u16 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    loop {
        let number = 61 * std::process::id() + NEXT.fetch_add(1, Relaxed);
        let port = 20_000 + (number % 10_000) as u16;
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}

pub(in crate::comm) fn rendezvous(rank: usize, size: usize, port: u16, seconds: u64) -> Rendezvous {
    Rendezvous {
        rank,
        size,
        host: "127.0.0.1".into(),
        port,
        job: "job 1".into(),
        one_machine: true,
        limit: Duration::from_secs(seconds),
    }
}

/// Each rank on a thread, with its own idea of the number of ranks.
fn meet_all(sizes: &[usize], seconds: u64) -> Vec<Result<PeerConnections>> {
    let port = free_port();
    std::thread::scope(|scope| {
        let open = |(rank, size): (usize, &usize)| {
            let rendezvous = rendezvous(rank, *size, port, seconds);
            scope.spawn(move || meet(&rendezvous, &format!("host-{rank}")))
        };
        let ranks: Vec<_> = sizes.iter().enumerate().map(open).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// Connects as soon as somebody listens.
fn stranger(port: u16) -> TcpStream {
    let begun = Instant::now();
    loop {
        match TcpStream::connect(("127.0.0.1", port)) {
            Ok(stream) => return stream,
            Err(_) => assert!(begun.elapsed() < Duration::from_secs(20)),
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn ranks_that_disagree_on_their_number_are_refused_on_both_sides() {
    let out = meet_all(&[3, 3, 2], 20);
    let texts: Vec<String> = out.into_iter().map(|mesh| mesh.err().unwrap().to_string()).collect();
    let want = "rank 2 (host host-2) is one of 2, rank 0 (host host-0) one of 3";
    assert!(texts.iter().all(|text| text.contains(want)), "{texts:#?}");
}

#[test]
fn a_rank_that_does_not_come_is_named_to_all() {
    let out = meet_all(&[3, 3], 1);
    let texts: Vec<String> = out
        .iter()
        .map(|mesh| mesh.as_ref().err().unwrap().to_string())
        .collect();
    assert!(
        texts.iter().all(|text| text.contains("rank 2 of 3 missing after 1 s")),
        "{texts:#?}"
    );
    // All with the exit code of rank 0.
    let codes: Vec<i32> = out
        .iter()
        .map(|mesh| mesh.as_ref().err().unwrap().exit_code())
        .collect();
    assert_eq!(codes, [1, 1]);
    let alone = meet(&rendezvous(1, 2, free_port(), 0), "here")
        .err()
        .unwrap()
        .to_string();
    assert!(
        alone.contains("rank 1 cannot reach rank 0") && alone.contains("127.0.0.1:"),
        "{alone}"
    );
}

#[test]
fn another_program_on_the_port_is_refused() {
    let port = free_port();
    std::thread::scope(|scope| {
        let root = scope.spawn(move || meet(&rendezvous(0, 2, port, 20), "a"));
        stranger(port).write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
        meet(&rendezvous(1, 2, port, 20), "b").unwrap();
        root.join().unwrap().unwrap();
    });
}

#[test]
fn those_that_say_nothing_or_little_keep_no_rank_waiting() {
    let port = free_port();
    std::thread::scope(|scope| {
        let root = scope.spawn(move || meet(&rendezvous(0, 2, port, 20), "a"));
        let silent: Vec<TcpStream> = (0..20).map(|_| stranger(port)).collect();
        for mut one in &silent[10..] {
            one.write_all(&[9]).unwrap();
        }
        let begun = Instant::now();
        meet(&rendezvous(1, 2, port, 20), "b").unwrap();
        root.join().unwrap().unwrap();
        assert!(begun.elapsed() < GREETING_TIMEOUT, "{:?}", begun.elapsed());
    });
}

#[test]
fn a_rank_of_another_job_is_sent_away_and_changes_nothing() {
    let port = free_port();
    std::thread::scope(|scope| {
        let root = scope.spawn(move || meet(&rendezvous(0, 2, port, 20), "a"));
        // Another number of ranks too, which ends a job of its own.
        for job in ["job 2", "", "job 1 and more"] {
            let other = Rendezvous {
                job: job.into(),
                ..rendezvous(1, 3, port, 20)
            };
            let error = meet(&other, "c").err().unwrap();
            assert!(error.to_string().contains("rank 0 belongs to another job"), "{error}");
            assert_eq!(error.exit_code(), 2);
        }
        meet(&rendezvous(1, 2, port, 20), "b").unwrap();
        root.join().unwrap().unwrap();
    });
}

#[test]
fn rank_0_listens_for_one_machine_only_if_its_name_says_so() {
    let alone = |host: &str, one_machine: bool| {
        let rendezvous = Rendezvous {
            host: host.into(),
            one_machine,
            ..rendezvous(0, 2, 0, 1)
        };
        listen(&rendezvous).unwrap().local_addr().unwrap().ip().is_loopback()
    };
    assert!(alone("127.0.0.1", true) && alone("localhost", true));
    // The system reads this as 127.0.0.1, as it does with many a host name in its own /etc/hosts.
    assert!(!alone("127.1", true));
    assert!(!alone("127.0.0.1", false), "some ranks are on other machines");
}

#[test]
fn loopback_addresses_are_for_ranks_of_one_machine() {
    let (near, far) = ("127.0.0.1:9", "10.0.0.2:9");
    assert!(!some_are_unreachable(&[near, near, "[::1]:9"]));
    assert!(!some_are_unreachable(&[far, far]));
    assert!(some_are_unreachable(&[near, far]));
}

#[test]
fn rank_0_on_another_machine_than_its_address_says_so() {
    let elsewhere = Rendezvous {
        // Of a block of addresses for documents.
        host: "192.0.2.1".into(),
        ..rendezvous(0, 3, 9, 7)
    };
    let found = late(&elsewhere, "x", &[None, None, None]).to_string();
    assert!(
        found.contains(
            "ranks 1, 2 of 3 missing after 7 s; rank 0 is on host x; MASTER_ADDR is the address of another machine"
        ),
        "{found}"
    );
    let here = late(&rendezvous(0, 2, 9, 7), "x", &[None, None]).to_string();
    assert!(
        here.contains("rank 1 of 2 missing after 7 s; rank 0 is on host x") && !here.contains("MASTER_ADDR"),
        "{here}"
    );
}

#[test]
fn a_text_has_a_limit_of_time_as_a_whole() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut slow = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (hears, _) = listener.accept().unwrap();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            slow.write_all(&[40, 0, 0, 0]).unwrap();
            for _ in 0..40 {
                std::thread::sleep(Duration::from_millis(100));
                if slow.write_all(b"x").is_err() {
                    return;
                }
            }
        });
        let begun = Instant::now();
        let heard = receive_text(&hears, SHORT, begun + Duration::from_millis(500));
        assert!(
            heard.is_err() && begun.elapsed() < Duration::from_secs(3),
            "{:?}",
            begun.elapsed()
        );
        drop(hears);
    });
}
