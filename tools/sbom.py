#!/usr/bin/env python3
"""Writes the bill of materials of the program `ft` to standard output: CycloneDX 1.5 as JSON.

    tools/sbom.py [FEATURES] > ft.cdx.json        FT_SBOM_TARGET is the target (default: this machine)

Every package that is linked into ft or runs in its build, with version, license and the checksum of Cargo.lock. The
output depends only on the sources: no time, no random number. `tests/tidy/supply.rs` checks the same packages.
"""

import json
import os
import subprocess
import sys
import tomllib


def main():
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    target = os.environ.get("FT_SBOM_TARGET") or subprocess.run(
        ["rustc", "--print", "host-tuple"], capture_output=True, text=True, check=True
    ).stdout.strip()
    command = ["cargo", "metadata", "--locked", "--format-version", "1", "--filter-platform", target]
    # The metadata have the features of all platforms, and so packages that are not in this build.
    tree = ["cargo", "tree", "--locked", "--package", "ft", "--target", target, "--edges", "normal,build", "--prefix", "none"]
    if len(sys.argv) > 1:
        command += ["--features", sys.argv[1]]
        tree += ["--features", sys.argv[1]]
    metadata = json.loads(subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout)
    lines = subprocess.run(tree, cwd=root, capture_output=True, text=True, check=True).stdout.splitlines()
    built = {tuple(line.split()[:2]) for line in lines if line.strip()}
    with open(os.path.join(root, "Cargo.lock"), "rb") as lock:
        locked = {(p["name"], p["version"]): p.get("checksum") for p in tomllib.load(lock)["package"]}
    packages = {p["id"]: p for p in metadata["packages"]}
    nodes = {n["id"]: n for n in metadata["resolve"]["nodes"]}
    program = next(i for i, p in packages.items() if p["name"] == "ft" and p["source"] is None)
    # From the program on, without what only tests need.
    reached, waiting, edges = set(), [program], {}
    while waiting:
        now = waiting.pop()
        if now in reached:
            continue
        reached.add(now)
        used = [d["pkg"] for d in nodes[now]["deps"] if any(k["kind"] != "dev" for k in d["dep_kinds"])]
        used = [i for i in used if (packages[i]["name"], "v" + packages[i]["version"]) in built]
        edges[now] = used
        waiting += used

    def reference(package_id):
        package = packages[package_id]
        return f"pkg:cargo/{package['name']}@{package['version']}"

    def component(package_id):
        package = packages[package_id]
        out = {
            "type": "application" if package_id == program else "library",
            "bom-ref": reference(package_id),
            "name": package["name"],
            "version": package["version"],
            "purl": reference(package_id),
            "licenses": [{"expression": package["license"].replace("/", " OR ")}],
        }
        checksum = locked.get((package["name"], package["version"]))
        if checksum:
            out["hashes"] = [{"alg": "SHA-256", "content": checksum}]
        return out

    order = sorted(reached, key=reference)
    print(json.dumps({
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": component(program)},
        "components": [component(i) for i in order if i != program],
        "dependencies": [{"ref": reference(i), "dependsOn": sorted({reference(d) for d in edges[i]})} for i in order],
    }, indent=1))


if __name__ == "__main__":
    main()
