//! TEMP
pub struct Plan {
    pub peak_bytes: u64,
}
impl Plan {
    pub fn json(&self) -> serde_json::Value {
        serde_json::json!({"peak_bytes": self.peak_bytes})
    }
    pub fn table(&self) -> String {
        String::new()
    }
}
