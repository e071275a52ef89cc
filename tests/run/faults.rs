//! The faults against which ft is tested, as rows with the tests of each: `docs/reliability.md`. A row without a test
//! that exists fails.

use std::fmt::Write;
use std::fs;
use std::path::Path;

/// Name, what is done to ft, what happens; the tests as `file::test`, separated by spaces. Without tests the last part is
/// the reason.
type Row = (&'static str, &'static str, &'static str, &'static str);

const CRASHES: [Row; 15] = [
    (
        "C1",
        "killed (SIGKILL) before numbered file operations or in the middle of a write, again during the resume; killed at random moments",
        "the resume continues from the newest complete checkpoint; metrics and result have the bits of an undisturbed run; leftovers are removed and named",
        "tests/run/power.rs::kills_at_file_operations_lose_nothing tests/run/resume.rs::a_run_killed_at_random_points_resumes_to_the_same_bits tests/run/resumes.rs::kills_at_random_moments_of_every_pair_lose_nothing src/checkpoint/kill_tests.rs::a_process_killed_at_any_moment_leaves_a_state_that_loads crates/ft-base/src/staging/held.rs::cleaning_removes_what_a_killed_process_left_and_nothing_that_is_in_use src/train/teacher_cache/tests.rs::what_a_killed_process_left_is_removed_and_nothing_else tests/run/scratch.rs::a_model_written_from_a_checkpoint_leaves_the_run_directory_with_its_process tests/run/scratch.rs::stored_outputs_go_on_after_a_kill_and_are_not_written_by_two_processes crates/ft-base/src/staging/held.rs::a_scratch_directory_of_another_machine_stays_for_a_day crates/ft-base/src/staging/held.rs::a_removal_that_was_killed_leaves_nothing_that_stays_for_good tests/run/power/goes_on.rs::a_run_that_was_killed_before_it_has_its_checkpoint_goes_on_from_where_that_is tests/run/power/goes_on.rs::a_fault_between_the_two_renames_of_a_replacement_loses_nothing tests/run/power/goes_on.rs::faults_in_a_run_that_goes_on_lose_nothing src/train/owner.rs::a_run_knows_from_where_it_goes_on_until_that_checkpoint_is_there src/train/directory/tests.rs::a_refused_resume_from_elsewhere_changes_no_later_resume src/train/directory/tests.rs::a_run_whose_removal_is_interrupted_does_not_go_on_from_elsewhere src/train/directory/tests.rs::a_checkpoint_that_was_brought_for_one_run_does_not_count_for_another src/train/owner/results.rs::a_previous_result_whose_removal_was_killed_is_removed_later",
    ),
    (
        "C2",
        "killed between two files of one checkpoint, or while the hashes of a new `final/` are computed",
        "the incomplete checkpoint is ignored; no mix of two states: the manifest names every file with size and hash. `final/` is not called damaged",
        "tests/run/power.rs::kills_at_file_operations_lose_nothing src/checkpoint/tests.rs::a_save_cut_off_between_two_files_is_ignored_and_cleaned src/train/owner/results.rs::a_result_without_hashes_is_not_called_damaged_and_is_known_to_be_ours src/train/owner/results.rs::a_result_that_was_not_recorded_is_removed_when_the_new_one_has_its_bytes src/train/owner/results.rs::a_kill_before_the_hashes_leaves_no_result_that_is_called_damaged_or_stays_for_good src/train/owner/results.rs::a_new_result_that_is_not_recorded_yet_is_not_called_damaged src/train/owner/results.rs::a_first_result_that_is_not_recorded_yet_is_not_called_one_of_an_earlier_version src/train/owner/results.rs::a_previous_result_that_was_moved_aside_before_a_kill_is_removed_later tests/run/power/goes_on.rs::a_fault_between_the_two_renames_of_a_replacement_loses_nothing src/train/owner/results.rs::a_previous_result_whose_removal_was_killed_is_removed_later",
    ),
    (
        "C3",
        "a write fails with \"no space\", a quota that is used up or an input/output error: this write alone, or all later ones too",
        "error with the path (logs and caches: a warning), earlier checkpoints stay whole, the resume has the same bits; if `final/` fails, the last state is saved; a full disk in a save is a warning on one rank: the run goes on and saves later; without the checkpoint of the best evaluation the best saved one stays; without that of the last step `final/` is written. The cache of the hub: an error with the path and `HF_HUB_CACHE`, and the next download goes on",
        "tests/run/power.rs::a_result_that_cannot_be_written_is_not_lost tests/run/power.rs::writes_that_fail_are_told_and_lose_nothing tests/run/limits.rs::a_run_works_under_limits_or_is_refused src/checkpoint/tests.rs::a_failed_save_leaves_the_old_state_and_nothing_else tests/run/power.rs::a_failed_sync_and_a_loss_of_power_keep_the_last_saved_state tests/hub/cache.rs::a_file_in_the_place_of_the_cache_or_of_a_part_of_it_is_named_with_what_to_set tests/hub/cache.rs::a_read_only_cache_is_named_with_what_to_set_and_is_used_if_it_is_whole tests/hub/cache.rs::a_disk_that_is_full_in_a_download_loses_nothing_and_the_next_one_goes_on tests/run/power.rs::a_log_that_fails_once_has_all_lines_in_the_end tests/run/best.rs::a_run_ends_early_with_the_best_model_and_a_resumed_one_too tests/run/rehearsal.rs::a_full_disk_in_a_save_does_not_end_the_run src/report/log/tests.rs::a_removal_after_a_failed_sync_leaves_no_line_twice_and_none_torn src/report/log/tests.rs::lines_that_cannot_be_removed_go_before_the_next_line_is_written src/report/log/tests.rs::a_removal_that_fails_and_then_finds_nothing_keeps_the_lines src/report/log/tests.rs::a_repeated_evaluation_is_written_once_if_its_lines_wait src/report/log/tests.rs::lines_that_can_never_be_removed_do_not_cost_the_others src/report/log/tests.rs::lines_of_an_earlier_run_that_stay_at_first_are_gone_later src/report/log/tests.rs::an_event_file_that_cannot_be_created_has_all_lines_later src/report/log/tests.rs::an_event_file_has_no_evaluation_that_is_removed_late tests/run/full.rs::a_full_disk_at_the_best_evaluation_does_not_end_the_run tests/run/full.rs::without_room_for_any_evaluation_the_model_of_the_last_step_is_the_result tests/run/full.rs::a_full_disk_at_the_save_of_the_last_step_leaves_the_result tests/run/full.rs::a_disk_that_stays_full_after_the_last_step_ends_the_run_with_an_error tests/run/power/goes_on.rs::faults_in_a_run_that_goes_on_lose_nothing src/report/log/tests.rs::a_line_after_a_torn_one_is_whole_also_if_those_between_were_too_many src/report/log/tests.rs::an_evaluation_of_an_earlier_run_whose_lines_stay_is_not_one_of_this_run src/report/log/tests.rs::an_event_file_is_kept_if_an_earlier_one_cannot_be_emptied src/train/best.rs::a_run_that_goes_on_has_no_evaluation_after_its_checkpoint",
    ),
    (
        "C4",
        "too little disk space at the start",
        "`ft plan` and `ft train` say how much is needed and free; `ft train` refuses. The checkpoints of a run that is resumed count as free space",
        "tests/run/plans.rs::a_plan_says_whether_it_fits_and_what_the_disk_has_to_hold src/checkpoint/tests.rs::room_is_counted_before_anything_is_written src/checkpoint/tests.rs::checkpoints_that_cannot_be_linked_are_copied_only_if_the_disk_has_room tests/run/mounts.rs::a_resume_needs_no_more_space_than_the_run",
    ),
    (
        "C5",
        "rotation with `train.save_total_limit = 1`, killed or with a damaged newest checkpoint",
        "the old checkpoint is removed after the new one is verified",
        "src/checkpoint/tests.rs::rotation_keeps_the_newest_and_deletes_only_when_it_verifies tests/run/power.rs::kills_at_file_operations_lose_nothing",
    ),
    (
        "C6",
        "loss of power after numbered file operations. The test drops the bytes that were not synced, sets them to zero, or chooses at random what the disk kept. It also keeps later changes of the names in a directory and drops earlier ones",
        "the last checkpoint that was saved survives, and the resume has the same bits. An incomplete directory stays, and is named, if its mark was lost and other names in it were not",
        "tests/run/power.rs::a_loss_of_power_keeps_the_last_saved_state tests/run/power.rs::a_failed_sync_and_a_loss_of_power_keep_the_last_saved_state tests/run/power/goes_on.rs::a_fault_between_the_two_renames_of_a_replacement_loses_nothing tests/run/power/goes_on.rs::faults_in_a_run_that_goes_on_lose_nothing src/train/owner/results.rs::a_previous_result_whose_removal_was_killed_is_removed_later",
    ),
    (
        "C7",
        "the run directory cannot be written, is a file, is a link, contains a link under a name that ft uses, or is moved during the run",
        "refused before the first step, but the run directory itself may be a link. If the directory is moved, the run stops; `--resume` continues it at the new place",
        "tests/run/directory.rs::a_file_or_a_link_in_the_place_of_the_run_directory tests/run/directory.rs::a_run_directory_that_moves_away_stops_the_run src/train/owner.rs::links_at_the_names_of_a_run_are_refused tests/run/power.rs::writes_that_fail_are_told_and_lose_nothing crates/ft-base/src/lock/kept.rs::a_directory_that_cannot_be_reached_for_a_moment_does_not_end_the_run crates/ft-base/src/lock/kept.rs::a_directory_with_only_its_file_removed_is_still_found_after_a_move",
    ),
    (
        "C8",
        "a bit flipped, the end cut off, a file removed: each file of a checkpoint, of `final/`, a cache, a run directory",
        "the file is named; `--resume --allow-older` continues from the newest whole checkpoint and says so; a cache is computed again, stored outputs of a teacher are an error with the command that repairs them; `ft runs verify` compares checkpoints and `final/` with their hashes; `ft push`, `merge`, `export`, `quantize`, `convert` and `adapter combine` refuse a damaged `final/`; `ft runs list` shows a damaged run with its reason beside the others, and `compare`, `plot` and `export` of a folder leave it out with a warning",
        "tests/run/decay.rs::damage_in_a_checkpoint_is_named_and_an_older_one_is_used_only_if_allowed tests/run/decay.rs::damage_beside_the_checkpoints_changes_no_result tests/run/decay.rs::damage_in_a_result_is_named tests/run/decay.rs::a_flipped_bit_in_a_result_is_named src/checkpoint/tests.rs::every_flipped_bit_of_every_file_is_noticed_and_named tests/run/directory.rs::a_stored_start_that_was_damaged_is_computed_again tests/run/distill.rs::stored_outputs_teach_like_the_teacher crates/ft-data/src/tokens/tests.rs::a_damaged_file_is_found_and_written_again_with_one_note crates/ft-data/src/tokens/tests.rs::a_flipped_bit_in_each_file_of_the_cache_is_found crates/ft-data/src/tokens/tests.rs::damage_in_each_file_of_the_cache_changes_no_row_and_no_fingerprint crates/ft-data/src/tokens/tests.rs::a_flipped_bit_in_a_made_result_makes_it_again_with_a_note src/train/teacher_cache/tests.rs::a_flipped_bit_in_any_byte_is_an_error_or_changes_nothing src/train/teacher_cache/tests.rs::a_changed_value_in_the_manifest_is_named src/train/teacher_cache/tests.rs::only_damaged_files_of_the_same_outputs_are_stored_again src/checkpoint/tests.rs::damage_in_files_that_only_some_runs_have_is_named tests/run/decay.rs::damage_in_the_averages_and_in_the_state_of_a_stage_is_named tests/run/decay.rs::a_damaged_token_cache_is_written_again_and_the_run_resumes tests/run/decay.rs::damage_in_stored_outputs_is_named_and_the_same_command_repairs_it tests/cli/unreadable.rs::damaged_runs_are_rows_with_a_reason_and_do_not_hide_the_others tests/cli/unreadable.rs::the_page_and_the_completions_have_the_runs_beside_a_damaged_one tests/cli/unreadable.rs::commands_over_a_folder_leave_damaged_runs_out_with_a_warning tests/cli/unreadable.rs::verify_goes_on_after_a_run_that_cannot_be_read tests/run/decay.rs::a_damaged_result_is_not_uploaded_merged_or_exported",
    ),
    (
        "C9",
        "two saves of the same step",
        "the new one replaces the old one when it is complete",
        "src/checkpoint/tests.rs::the_same_step_twice_replaces_the_state",
    ),
    (
        "C10",
        "a second `ft train` in the same run directory, a second `ft distill cache` in the same directory; processes with the same id in two containers",
        "refused; the message names the process that works there, and the time since when. The lock file of a killed run is no obstacle, even if its end is missing; one that is removed during the run is written again",
        "tests/run/resume.rs::a_run_directory_belongs_to_one_run crates/ft-base/src/lock.rs::a_file_of_another_program_is_no_lock crates/ft-base/src/staging/held.rs::a_scratch_directory_takes_a_free_name_and_leaves_that_of_another_process src/train/teacher_cache/tests.rs::a_second_process_is_refused_and_changes_nothing tests/run/scratch.rs::a_model_written_from_a_checkpoint_leaves_the_run_directory_with_its_process tests/run/scratch.rs::stored_outputs_go_on_after_a_kill_and_are_not_written_by_two_processes crates/ft-base/src/lock.rs::a_lock_or_mark_on_a_removed_file_is_not_taken crates/ft-base/src/lock/kept.rs::a_lock_file_that_was_removed_is_written_and_locked_again crates/ft-base/src/lock/kept.rs::a_lock_of_another_process_in_the_place_of_a_removed_one_is_an_error",
    ),
    (
        "C11",
        "the directory of a finished run, or of something else",
        "refused with the ways to go on; files that ft did not write are never changed; a run that ended before its first checkpoint starts again with `--resume`",
        "tests/run/directory.rs::a_run_that_ended_before_its_first_checkpoint_starts_again tests/run/directory.rs::a_directory_of_someone_else_is_refused_and_untouched tests/run/directory.rs::overwriting_removes_the_run_says_so_and_keeps_the_rest tests/run/directory.rs::a_resume_from_elsewhere_changes_no_results_in_the_output_directory",
    ),
    (
        "C12",
        "a reason to fail that is there from the beginning: no permission, read-only, no inode, no quota, too little space, a limit on the size of files, an export that cannot be written",
        "error before the first step: a save and the export are tried, with the space that they need, and an evaluation: a new run begins with one, a resume tries the longest held-out batch, and begins an answer to the longest prompt. Memory is forecast (S4, S5)",
        "tests/run/rehearsal.rs::a_resume_tries_an_evaluation_first tests/run/rehearsal.rs::what_would_fail_after_hours_fails_before_the_first_step tests/run/rehearsal.rs::a_rehearsal_that_fails_once_leaves_nothing tests/run/rehearsal.rs::the_rehearsal_reserves_what_a_save_and_the_export_write tests/run/rehearsal.rs::a_file_of_moments_above_the_limit_is_refused_before_the_first_step crates/ft-base/src/rehearse.rs::what_would_fail_later_fails_now_and_leaves_nothing tests/run/mounts.rs::any_number_of_inodes_or_bytes_works_or_is_refused_before_the_first_step tests/run/limits.rs::a_run_works_under_limits_or_is_refused tests/run/rehearsal.rs::a_resume_begins_an_answer_to_the_longest_prompt_and_has_the_same_bits tests/run/rehearsal.rs::a_sample_prompt_that_cannot_be_answered_fails_a_resume_before_its_first_step",
    ),
    (
        "C13",
        "a disk that stalls in a write or a sync, for 12 seconds or a minute",
        "the run waits and says for what, then goes on to the same bits",
        "tests/run/rehearsal.rs::a_disk_that_stalls_is_shown_and_loses_nothing tests/run/rehearsal.rs::a_disk_that_stalls_for_a_minute_is_shown_and_loses_nothing",
    ),
    (
        "C14",
        "a command that writes a model (`ft export`, `merge`, `quantize`, `convert`, `adapter combine`) killed at numbered file operations, or one of them fails",
        "error with the path; the directory is whole or not there; the same command writes it the second time",
        "tests/run/power.rs::a_broken_export_is_whole_or_not_there tests/run/power/exports.rs::every_command_that_writes_a_model_writes_it_whole_or_not_at_all",
    ),
    (
        "C15",
        "the download of a model, an adapter or a dataset is interrupted, and the network is gone at the next start",
        "a file that is missing is named; a part is not used as the whole",
        "tests/hub/cache.rs::a_part_of_a_data_set_is_not_the_whole_one_without_a_network tests/hub/cache.rs::an_adapter_without_its_template_is_not_whole",
    ),
];

const FORMATS: [Row; 11] = [
    (
        "F1",
        "safetensors with 0 or 7 bytes, with a header longer than the file, above the limit, or of 2^64 - 1 bytes",
        "error of its kind; nothing large is allocated",
        "crates/ft-formats/src/header.rs::an_empty_file crates/ft-formats/src/header.rs::seven_bytes crates/ft-formats/src/header.rs::header_longer_than_the_file crates/ft-formats/src/header.rs::header_over_the_cap_and_at_the_largest_number",
    ),
    (
        "F2",
        "safetensors with cut or trailing data, holes, overlaps, duplicate names, wrong shapes, overflows, no UTF-8, no JSON",
        "error that names file and tensor",
        "crates/ft-formats/src/header.rs::truncated_data crates/ft-formats/src/header.rs::trailing_bytes crates/ft-formats/src/header.rs::hole crates/ft-formats/src/header.rs::overlap crates/ft-formats/src/header.rs::duplicate_keys crates/ft-formats/src/header.rs::shape_and_bytes_disagree crates/ft-formats/src/header.rs::shape_overflow crates/ft-formats/src/header.rs::not_utf8_not_json_not_an_object",
    ),
    (
        "F3",
        "a file of weights shrinks while it is read",
        "error that names it; files are read, not mapped",
        "crates/ft-formats/src/weights/tests.rs::a_file_that_shrinks_after_it_was_opened",
    ),
    (
        "F4",
        "NaN or infinity in base weights or an adapter, also in scales and codes of quantized weights",
        "error that names the tensor, before the first step",
        "tests/run/directory.rs::a_moved_model_is_known_by_its_weights_and_a_changed_number_is_not crates/ft-core/src/hf/adapter_tests.rs::numbers_that_are_not_finite_and_missing_files_are_refused crates/ft-core/src/source/stored/finite.rs::numbers_that_are_not_finite_are_found_in_the_files_of_every_tool crates/ft-core/src/source/stored/finite.rs::numbers_that_are_not_finite_are_found_in_files_of_ft tests/run/quantodd.rs::a_number_that_is_not_finite_in_a_quantized_base_is_named_before_the_first_step",
    ),
    (
        "F5",
        "an index with `../x`, absolute names, links out of the directory, missing, extra or doubled shards; a pipe as a shard",
        "refused; nothing outside of the directory is opened",
        "crates/ft-formats/src/weights/tests.rs::names_that_leave_the_directory crates/ft-formats/src/weights/tests.rs::a_link_out_of_the_directory crates/ft-formats/src/weights/tests.rs::missing_shard crates/ft-formats/src/weights/tests.rs::extra_shard_beside_the_index crates/ft-formats/src/weights/tests.rs::tensor_in_two_shards tests/run/directory.rs::a_pipe_in_the_place_of_a_file_is_an_error_at_once tests/run/pipes.rs::a_pipe_or_a_device_in_the_place_of_a_file_of_the_model_is_an_error tests/run/pipes.rs::a_pipe_or_a_device_in_the_place_of_rows_is_an_error tests/run/pipes.rs::a_pipe_or_a_device_in_the_place_of_a_file_of_a_run_is_an_error_or_replaced",
    ),
    (
        "F6",
        "GGUF that is cut or damaged, with absurd lengths (ft reads only what it has written, to check it)",
        "error: no panic, nothing large is allocated",
        "crates/ft-formats/src/gguf/tests.rs::damaged_files_are_errors tests/memory/parsers.rs::damaged_files_end_in_time_and_within_memory",
    ),
    (
        "F7",
        "weights or an adapter as a pickle (`.bin`, `.pt`, `.pth`)",
        "refused with the reason and a way to convert; never opened",
        "crates/ft-formats/src/weights/tests.rs::pickles_are_named_and_never_opened crates/ft-formats/src/adapter/tests.rs::a_pickle_adapter_is_refused_and_not_opened tests/run/hostile.rs::weights_that_lie",
    ),
    (
        "F8",
        "`config.json` with `auto_map` and other names of code; huge, negative or contradictory numbers",
        "code is ignored with a warning; the number is refused with its key, and takes no memory that the weights do not have",
        "tests/run/hostile.rs::names_of_code_in_a_config_are_ignored_with_a_warning tests/run/hostile.rs::configs_that_ft_cannot_compute tests/memory/hostile.rs::numbers_of_a_config_take_no_memory_that_the_weights_do_not_have crates/ft-core/src/source/stored/settings.rs::widths_that_cannot_be_read_are_refused_at_the_config",
    ),
    (
        "F9",
        "weights and config disagree",
        "all differences in one error; a size that no tensor has is refused first, by its key",
        "tests/run/hostile.rs::all_differences_of_weights_and_config_stand_in_one_error crates/ft-formats/src/fits.rs::sizes_that_are_not_those_of_the_weights_are_refused crates/ft-core/src/hf/adapter_tests.rs::all_differences_stand_in_one_error",
    ),
    (
        "F10",
        "a Git LFS pointer in the place of weights",
        "named as such, with the command that fetches the file",
        "crates/ft-formats/src/weights/tests.rs::git_lfs_pointers crates/ft-formats/src/header.rs::git_lfs_pointer",
    ),
    (
        "F11",
        "random damage to the bytes of every format that ft parses",
        "a value or an error: no panic, no hang, memory bounded by the size of the input",
        "crates/ft-formats/src/header.rs::random_damage_never_panics tests/memory/parsers.rs::damaged_files_end_in_time_and_within_memory tests/run/fuzzed.rs::fuzz_targets_take_whole_and_damaged_seeds crates/ft-data/src/read/parquet/limits/tests.rs::a_page_that_would_take_much_memory_is_refused crates/ft-data/src/read/parquet/limits/tests.rs::a_page_header_that_can_be_read_in_two_ways_is_refused crates/ft-data/src/read/parquet/limits/tests.rs::a_footer_with_lists_of_nothing_is_refused crates/ft-data/src/read/arrow/tests.rs::damaged_bits_give_rows_or_one_error src/recipe/import/yaml.rs::deep_nesting_is_an_error_in_time crates/ft-data/src/read/arrow/tests.rs::a_column_with_more_values_than_bytes_is_refused crates/ft-data/src/read/parquet/budget/tests.rs::columns_count_together",
    ),
];

const RECIPES: [Row; 9] = [
    (
        "R1",
        "unknown keys at any depth, keys in the wrong table",
        "exit 2, all faults at once with line, column and \"did you mean\"",
        "src/recipe/tests.rs::all_faults_at_once_each_with_its_place tests/cli.rs::recipe_faults_exit_2_and_leave_nothing",
    ),
    (
        "R2",
        "wrong types, values out of range, keys that contradict each other",
        "as R1; both keys are named",
        "src/recipe/tests_stages.rs::contradictions_name_both_keys src/recipe/tests.rs::faults_in_other_shapes_of_toml",
    ),
    (
        "R3",
        "every shipped recipe",
        "parses, is planned and round-trips",
        "src/cli/recipes.rs::every_recipe_in_the_folder_is_shipped_and_parses_without_a_warning src/cli/recipes.rs::every_recipe_is_planned_and_those_for_a_gpu_fit_it",
    ),
    (
        "R4",
        "a run stopped at any step, within steps too: methods, stages, tiers, storage, packing, accumulation",
        "the resumed run has the bits of an undisturbed one",
        "tests/run/resumes.rs::every_pair_of_the_matrix_resumes_to_the_same_bits tests/run/resume.rs::a_run_stopped_within_steps_resumes_to_the_same_bits tests/run/resume.rs::a_run_killed_at_random_points_resumes_to_the_same_bits tests/run/rl.rs::every_way_resumes_to_the_same_bits",
    ),
    (
        "R5",
        "stopped in a later epoch, during or before an evaluation, after a block switch",
        "as R4; the resumed run does the missing evaluation, each line of metrics is there once (`events.jsonl` keeps the lines of all processes)",
        "tests/run/resumes.rs::an_evaluation_made_up_for_sees_the_block_before_its_switch tests/run/resumes.rs::every_pair_of_the_matrix_resumes_to_the_same_bits tests/run/resume.rs::an_evaluation_that_was_cut_off_is_made_up_for tests/run/resume.rs::a_signal_in_the_last_evaluation_leaves_it_to_the_resume",
    ),
    (
        "R6",
        "a resume with another seed, data, tokenizer, base model, type, batch, optimizer; by another program, or on another machine",
        "refused with a table old -> new; harmless changes are allowed and printed, and moved files (model, rows, adapter, rewards, template) if their hashes are the same, without a flag; a warning if the length of the run changed the learning rates of the steps before. Another program, processor, set of operations or GPU is allowed too, with a warning old -> new: the last bits may differ",
        "tests/run/resume.rs::a_resume_by_another_program_or_processor_says_so tests/run/resume.rs::a_resume_of_another_run_is_refused src/train/resumed.rs::only_harmless_changes_are_let_through src/train/resumed.rs::sources_may_move_and_keep_their_weights src/train/resumed.rs::a_key_that_an_old_checkpoint_lacks_had_its_default tests/run/directory.rs::a_moved_model_is_known_by_its_weights_and_a_changed_number_is_not crates/ft-data/src/streaming/tests.rs::a_stream_is_known_by_the_content_of_its_files_and_not_by_their_names crates/ft-data/src/streaming/tests.rs::a_stream_is_known_by_the_rows_with_which_it_is_compared_too src/train/side_inputs.rs::an_adapter_is_known_by_weights_and_settings_and_not_by_its_place src/train/side_inputs.rs::a_template_is_known_by_its_text_and_compared_rows_by_the_training_rows src/train/side_inputs.rs::a_program_may_move_or_change_but_not_both src/setup/rewards/contents.rs::a_reward_model_is_known_by_weights_score_and_tokenizer tests/run/resume_inputs.rs::rows_that_are_read_during_the_run_may_move_and_not_change tests/run/resume_inputs.rs::adapters_and_rewards_may_move_and_not_change tests/run/best.rs::a_run_ends_early_with_the_best_model_and_a_resumed_one_too tests/run/export.rs::the_base_model_of_a_checkpoint_may_have_moved tests/run/directory.rs::what_someone_added_to_final_is_kept_when_it_is_replaced",
    ),
    (
        "R7",
        "a start from the weights of an adapter only",
        "a key of its own (`tune.lora.adapter`); optimizer and data start anew",
        "tests/hub/programs.rs::a_run_starts_from_an_adapter_and_a_teacher_of_the_hub",
    ),
    (
        "R8",
        "a checkpoint of another version (`tests/run/versions` keeps one of each layout)",
        "read, or refused with both versions",
        "tests/run/directory.rs::a_kept_checkpoint_of_an_earlier_version_goes_on src/checkpoint/tests.rs::another_layout_is_refused_with_both_versions tests/run/directory.rs::a_run_of_an_earlier_version_is_known_and_goes_on",
    ),
    (
        "R9",
        "8 rows at once, or one row 8 times with accumulation, of uneven lengths",
        "the same loss and gradient norm",
        "tests/run/equal.rs::eight_rows_at_once_are_one_row_eight_times",
    ),
];

const DATA: [Row; 10] = [
    (
        "D1",
        "broken rows: no JSON, wrong fields, null, no UTF-8, byte order mark, CRLF, a line of 100 MB",
        "file, line and field of each, with counts",
        "tests/run/hostile.rs::rows_that_are_broken crates/ft-data/src/read/tests.rs::bytes_that_are_not_utf8_are_named_with_their_column crates/ft-data/src/layout/tests.rs::all_bad_rows_are_counted crates/ft-data/src/tests.rs::a_fault_in_a_late_row_names_that_row",
    ),
    (
        "D2",
        "all rows empty, or longer than the maximum",
        "refused with counts",
        "crates/ft-data/src/tests.rs::a_data_set_in_which_nothing_is_trained_is_refused_with_counts tests/run/hostile.rs::rows_that_are_broken",
    ),
    (
        "D3",
        "rows longer than the maximum",
        "counted and reported once at the start",
        "crates/ft-data/src/tests.rs::truncation_and_dropped_rows_are_counted",
    ),
    (
        "D4",
        "a tokenizer with more tokens than the embedding has rows",
        "refused with both sizes, or new rows if the recipe asks for them",
        "tests/run/tokens.rs::tokens_without_a_row_get_one_when_asked",
    ),
    (
        "D5",
        "tokenizer, config and generation config name different end tokens",
        "a warning with all of them",
        "tests/run/directory.rs::end_tokens_that_disagree_are_told",
    ),
    (
        "D6",
        "conversations and a model without a chat template",
        "exit 2 with the templates that ft has and the key that names one",
        "tests/run/hostile.rs::templates_that_are_missing",
    ),
    (
        "D7",
        "rows in which nothing is trained",
        "left out and counted; a dataset in which no row has a trained token is refused",
        "crates/ft-data/src/tests.rs::a_data_set_in_which_nothing_is_trained_is_refused_with_counts crates/ft-data/src/encode/tests_chat.rs::a_turn_that_cannot_be_found_is_an_error_not_a_mask",
    ),
    (
        "D8",
        "templates that recurse, loop, print without end, reach for files or names, or are wrong",
        "error in time, in a process with limits and without files and network",
        "crates/ft-formats/src/jinja/tests.rs::no_template_hangs_or_takes_all_memory_or_stack tests/run/sandbox.rs::the_process_is_confined_and_ends_with_its_input tests/run/sandbox.rs::hostile_templates_end_the_command_with_an_error_and_leave_no_process crates/ft-formats/src/template/tests.rs::nothing_outside_can_be_reached",
    ),
    (
        "D9",
        "text of special tokens inside what a user says",
        "encoded as plain text",
        "crates/ft-data/src/encode/tests_chat.rs::special_tokens_in_a_users_text_are_plain_text",
    ),
    (
        "D10",
        "rows edited between a run and its resume",
        "the resume is refused",
        "tests/run/resume.rs::a_resume_of_another_run_is_refused",
    ),
];

const ADAPTERS: [Row; 6] = [
    (
        "A1",
        "rank, alpha or shapes that do not fit",
        "refused with expected and found",
        "crates/ft-core/src/hf/adapter_tests.rs::all_differences_stand_in_one_error crates/ft-formats/src/adapter/tests.rs::wrong_values_are_refused_by_name",
    ),
    (
        "A2",
        "targets that match no module",
        "refused with similar names",
        "tests/run/hostile.rs::adapters_that_do_not_fit",
    ),
    (
        "A3",
        "missing or unexpected tensors",
        "refused; nothing is applied",
        "crates/ft-core/src/hf/adapter_tests.rs::targets_limit_what_must_be_there crates/ft-core/src/hf/adapter_tests.rs::all_differences_stand_in_one_error",
    ),
    (
        "A4",
        "an adapter of another base model",
        "refused by every command",
        "tests/run/adapters.rs::an_adapter_that_does_not_fit_is_refused_by_every_command",
    ),
    (
        "A5",
        "adapters of PEFT in ft, and of ft in PEFT",
        "the same logits",
        "tests/parity/adapters.rs::logits_with_an_adapter_are_those_of_peft tests/parity/adapters.rs::every_kind_by_peft_gives_its_logits_and_its_loss_also_merged",
    ),
    (
        "A6",
        "merge, then compare with base and adapter",
        "the same logits",
        "tests/parity/adapters.rs::merged_weights_are_those_of_peft src/commands/merge/tests.rs::merging_adds_the_delta_and_touches_nothing_else",
    ),
];

const RUNNING: [Row; 11] = [
    (
        "S1",
        "a loss or a gradient that is not finite",
        "the run stops, and the state of the step before is saved if checkpoints are on and there is a step before; not right after a block switch, with the block corrections `sgd` and `signsgd`, with `distributed.sync_every`, and after the error of one rank whose state is in parts. The error names the step and its rows (8 at most; of the micro-batch, if it is known), for a gradient also the first tensor, if it is known (on a GPU not always). If gradients are applied at once (`train.max_grad_norm = 0` with one micro-batch, or to save memory) and some were applied, it is not saved: the steps after the last checkpoint are lost. Nothing that is not finite is saved",
        "tests/run/hostile.rs::numbers_that_are_not_finite_stop_the_run_and_save_nothing crates/ft-formats/src/writer/tests.rs::a_number_that_is_not_finite_never_reaches_a_file tests/run/hostile.rs::a_gradient_that_is_not_finite_names_its_tensor_and_the_rows_of_the_step tests/run/hostile.rs::a_loss_that_is_not_finite_names_the_row",
    ),
    (
        "S2",
        "a loss that rises",
        "one warning",
        "src/train/learning.rs::a_diverging_loss_gets_one_warning",
    ),
    (
        "S3",
        "SIGINT once and twice, SIGTERM, SIGHUP, SIGUSR1, in steps, evaluations, rollouts, saves, while rows are prepared, in commands that write a model, in an upload; SIGINT in answers; a terminal that is closed",
        "in steps, evaluations, rollouts and saves the state is saved; while rows are prepared nothing is left; a result is whole or not there; an upload ends without a commit; exit 128 + signal, 131 after the second Ctrl-C",
        "tests/run/resume.rs::a_run_stopped_within_steps_resumes_to_the_same_bits tests/terminal.rs::a_run_whose_terminal_is_closed_saves_its_state tests/run/resume.rs::signals_save_the_state_and_exit_with_their_code tests/terminal.rs::a_second_interrupt_says_what_is_lost tests/run/chat.rs::a_signal_stops_an_answer tests/run/resume.rs::a_signal_in_the_last_evaluation_leaves_it_to_the_resume tests/run/scratch.rs::a_model_written_from_a_checkpoint_leaves_the_run_directory_with_its_process tests/run/stopped.rs::a_signal_in_a_save_ends_the_run_with_that_checkpoint tests/run/stopped.rs::a_signal_while_rows_are_prepared_ends_the_program_and_leaves_nothing tests/run/stopped.rs::a_signal_in_a_command_that_writes_a_model_leaves_nothing tests/run/stopped.rs::a_signal_while_outputs_of_a_teacher_are_stored_leaves_whole_files tests/hub/push.rs::a_signal_in_an_upload_ends_it_without_a_commit_and_the_next_one_goes_on",
    ),
    (
        "S4",
        "a run that does not fit into the memory",
        "refused before anything is loaded, with changes that fit",
        "tests/run/plans.rs::a_run_larger_than_the_memory_is_refused_before_it_loads_anything tests/run/plans.rs::changes_that_are_named_fit",
    ),
    (
        "S5",
        "more memory than the budget during a run; a hard limit on memory",
        "the state is saved and the run stops; under a hard limit the plan is one whose forecast is below it. If the system has no more memory, the message of the abort names the checkpoint from which a run on one rank goes on, or says that there is none",
        "tests/memory/stages.rs::a_run_that_passes_its_budget_stops_and_saves_its_state tests/run/caps.rs::a_model_larger_than_the_cap_trains_from_the_disk_to_the_same_bits tests/run/caps.rs::the_same_run_from_memory_does_not_fit_under_the_cap",
    ),
    (
        "S6",
        "the GPU disappears, or its driver answers with an error from some kernel on (simulated by `tools/soft-cuda`)",
        "error with the device and the last checkpoint, which is whole; the resume has the same bits",
        "tests/gpu/device.rs::a_lost_device_ends_the_run_and_its_last_checkpoint_goes_on src/train/ended.rs::only_errors_of_a_driver_are_those_of_the_device",
    ),
    (
        "S7",
        "a clock that is in 1970 or 2100 and jumps, no HOME, no `/dev/shm`, `/sys` or `/proc`, few open files, little memory and stack, one processor, no huge pages, umask 0777, an unwritable cache, no terminal, closed or broken output",
        "the run has the same bits, or is refused at the start",
        "tests/run/limits.rs::a_clock_that_jumps_changes_nothing tests/run/limits.rs::a_run_without_huge_pages_has_the_same_bits tests/run/limits.rs::any_number_of_open_files_works_or_is_refused_before_the_first_step tests/run/limits.rs::a_run_works_under_limits_or_is_refused tests/run/mounts.rs::missing_and_locked_places_are_no_obstacle_or_refused tests/run/resume.rs::a_run_goes_on_if_nobody_reads_its_messages tests/cli.rs::a_reader_that_goes_away_is_no_failure tests/run/readers.rs::a_reader_that_goes_away_is_no_failure_of_any_command tests/run/limits.rs::a_scratch_directory_that_looks_old_stays_while_it_is_used",
    ),
    (
        "S8",
        "metrics or events that cannot be written",
        "one warning; the run goes on to the same result",
        "tests/run/power.rs::writes_that_fail_are_told_and_lose_nothing",
    ),
    (
        "S9",
        "forecast and measured peak of memory, for methods, stages, tiers",
        "within 10 %",
        "tests/memory/peak.rs::the_peak_of_a_step_is_within_a_tenth_of_the_forecast tests/memory/stages.rs::the_peak_of_a_run_is_within_a_tenth_of_the_forecast",
    ),
    (
        "S10",
        "a limit on memory by a control group (versions 1 and 2, also of a parent)",
        "`memory.budget = \"auto\"` and the plan keep below it",
        "crates/ft-base/src/memory.rs::groups_of_both_versions_and_their_parents_limit_the_memory crates/ft-base/src/memory.rs::a_group_leaves_what_its_limit_and_its_use_say tests/run/mounts.rs::a_run_keeps_below_the_memory_of_its_group",
    ),
    (
        "S11",
        "many steps",
        "the last steps hold no more memory, open files and threads than the first; lines of metrics are put at the end, also after a resume",
        "tests/run/long.rs::a_longer_run_holds_no_more_memory_files_or_threads tests/run/long.rs::metrics_are_appended_and_never_written_again tests/run/long.rs::a_hundred_thousand_steps_hold_no_more_memory_files_or_threads tests/run/long.rs::metrics_that_do_not_fit_in_memory_are_appended tests/run/long.rs::metrics_of_a_gigabyte_are_appended tests/run/long.rs::a_longer_run_by_blocks_from_the_disk_holds_no_more_memory_files_or_threads tests/run/long.rs::a_longer_run_with_rollouts_holds_no_more_memory_files_or_threads",
    ),
];

const SURFACE: [Row; 8] = [
    (
        "W1",
        "what listens on the network",
        "`ft dash` listens, on 127.0.0.1. Ranks without MPI listen for each other; those of `ft launch` listen on 127.0.0.1. No other command listens, and none opens a socket unless it uses a hub",
        "tests/run/egress.rs::no_program_opens_a_socket_and_no_secret_is_kept tests/cli/dash.rs::the_page_is_for_this_machine_and_its_token_only tests/run/egress.rs::the_base_that_an_adapter_names_is_requested_only_online_and_after_a_note",
    ),
    (
        "W2",
        "`ft dash` asked from another host, under another name, without its token, by another method than GET",
        "refused: there is no flag for another address, and names of hosts and the token are checked",
        "tests/cli/dash.rs::the_page_is_for_this_machine_and_its_token_only",
    ),
    (
        "W3",
        "paths from a browser that lead out of the runs",
        "not found: runs have numbers, and no part of a path becomes the name of a file",
        "tests/cli/dash.rs::the_page_is_for_this_machine_and_its_token_only",
    ),
    (
        "W4",
        "shells and commands put together from text",
        "none: three files start programs, each without a shell: a reward program (in its own process group), ft itself for chat templates, and `mpirun` or ft itself (as the ranks) for `ft launch`",
        "tests/tidy/supply.rs::programs_are_started_in_three_places crates/ft-base/src/worker.rs::a_worker_has_its_own_group_and_no_environment_but_what_is_given src/setup/rewards/program.rs::a_program_that_hangs_is_an_error_in_time",
    ),
    (
        "W5",
        "a hub that lies about names, hashes, sizes and redirects; a stolen token",
        "nothing is written outside of the cache, wrong contents are thrown away, the token goes to the hub alone",
        "tests/hub/lies.rs::a_lying_hub_writes_and_removes_nothing_outside_the_cache tests/hub/lies.rs::a_redirect_to_another_host_gets_no_token tests/hub.rs::damaged_content_never_gets_into_the_cache tests/run/egress.rs::no_program_opens_a_socket_and_no_secret_is_kept tests/hub/programs.rs::a_run_from_the_hub_with_a_token_keeps_no_token tests/hub/lies.rs::a_file_list_that_leads_in_a_circle_or_to_another_host_is_refused tests/run/egress.rs::a_secret_of_a_command_is_in_no_record_no_output_and_no_card tests/run/egress.rs::a_password_of_an_address_is_in_no_message_and_no_recipe",
    ),
    (
        "W6",
        "names with `../`, spaces, quotes, line breaks, escapes, and bytes that are not UTF-8; text of adapters, runs and configurations, and answers of a model, with escapes",
        "used as they are, or refused; no control sequence in them reaches the terminal, not even a color, and none adds a key to a recipe",
        "tests/terminal.rs::an_answer_with_escapes_is_shown_as_text tests/terminal.rs::text_of_files_is_shown_and_acts_on_no_terminal src/recipe/import/tests.rs::what_the_file_says_adds_no_keys_to_the_recipe tests/run/limits.rs::odd_names_work_or_are_refused tests/run/hostile.rs::nothing_from_a_file_acts_on_the_terminal src/report/layout.rs::nothing_from_a_file_acts_on_the_terminal tests/run/export.rs::links_to_other_places_are_not_exported_merged_or_uploaded crates/ft-formats/src/lib.rs::a_link_is_read_inside_the_directory_and_in_a_hub_cache_only tests/run/export.rs::links_to_other_places_are_not_read tests/terminal.rs::names_of_files_in_refused_arguments_act_on_no_terminal crates/ft-formats/src/lib.rs::a_hub_cache_may_have_its_blobs_on_another_disk",
    ),
    (
        "W7",
        "a dependency from another source, with another license, on the list of bans, or in a version that is not in the accepted list; an `unsafe` block without a reason",
        "each package has a checksum of the registry, an accepted license and an entry in `supply-chain/`; the code that runs during a build was read or searched; every `unsafe` block says why it is sound",
        "tests/tidy/supply.rs::every_dependency_is_accepted tests/tidy/supply.rs::every_dependency_has_an_entry tests/tidy/supply.rs::unsafe_code_is_counted tests/tidy/supply.rs::the_bill_of_materials_has_every_package",
    ),
    (
        "W8",
        "a reward program that opens sockets, reads secrets of the environment, takes all memory, or goes on when ft ends",
        "the system refuses its sockets, the secrets are not there, its memory is limited; `rlhf.reward_network` and `rlhf.reward_memory` change that. It ends with ft",
        "crates/ft-base/src/worker.rs::a_program_without_rights_opens_no_socket_sees_no_secret_and_has_a_limit tests/run/rl.rs::a_reward_program_has_no_network_and_no_secrets crates/ft-base/src/worker.rs::a_program_and_its_children_are_one_group_and_end_together crates/ft-base/src/worker/start.rs::a_program_ends_with_ft_also_if_a_signal_ends_it tests/run/rl.rs::a_reward_program_does_not_outlive_ft crates/ft-base/src/signal/groups.rs::a_look_at_a_program_that_ended_does_not_free_its_id src/setup/rewards/program.rs::the_group_of_a_program_that_ended_is_killed_before_its_id_is_free tests/run/egress.rs::a_secret_of_a_command_is_in_no_record_no_output_and_no_card crates/ft-base/src/signal/groups.rs::a_program_that_starts_while_a_signal_ends_ft_is_killed_too crates/ft-base/src/syscalls.rs::the_filter_refuses_sockets_and_access_to_other_processes crates/ft-base/src/worker/hidden.rs::secrets_move_to_other_memory_and_the_old_one_is_overwritten crates/ft-base/src/worker/hidden.rs::a_program_without_network_does_not_open_the_memory_of_ft tests/run/rl.rs::a_reward_program_finds_no_secret_in_what_the_system_shows_of_ft tests/run/rl.rs::a_reward_program_is_named_before_it_starts_and_only_a_run_starts_it",
    ),
];

const TABLES: [(&str, &[Row]); 7] = [
    ("Crashes and storage", &CRASHES),
    ("Formats", &FORMATS),
    ("Recipe and resume", &RECIPES),
    ("Data, tokenizer, template", &DATA),
    ("Adapters", &ADAPTERS),
    ("Running", &RUNNING),
    ("Surface", &SURFACE),
];

/// The text before the tables.
const HEAD: &str = include_str!("faults/head.txt");

/// Whether the file has this test; then whether it runs by hand only, and its comment.
pub fn found(file: &str, function: &str) -> Option<(bool, String)> {
    let text = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(file)).unwrap_or_default();
    let parts: Vec<&str> = text.split("#[test]").collect();
    parts.windows(2).find_map(|two| {
        let (before, name) = two[1].split_once("fn ")?;
        let by_hand = before.contains("#[ignore") && !before.contains(": .ci/run\"]");
        let lines = two[0].lines().rev().map(str::trim).skip_while(|line| line.is_empty());
        let comment = lines.take_while(|line| line.starts_with("//")).collect();
        (name.split_once('(')?.0 == function).then_some((by_hand, comment))
    })
}

/// True if a comment has `Row C1` or `Rows C1, C2`.
fn names_row(comment: &str, row: &str) -> bool {
    let lists = comment.split("Row").skip(1);
    let mut lists = lists.map(|list| list.split(['.', ':', '`']).next().unwrap_or_default());
    lists.any(|list| list.split(|c: char| !c.is_alphanumeric()).any(|word| word == row))
}

/// The links from promises to tests.
#[test]
fn every_promise_has_a_test() {
    let text = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("SECURITY.md")).unwrap();
    let links: Vec<(&str, &str)> = text
        .split("[`")
        .skip(1)
        .filter_map(|link| {
            let (name, rest) = link.split_once("`](")?;
            Some((rest.split_once(')')?.0, name))
        })
        .collect();
    assert!(links.len() > 15, "{links:?}");
    for (file, name) in links {
        assert!(
            found(file, name).is_some_and(|(by_hand, _)| !by_hand),
            "SECURITY.md: {file} has no test `{name}`"
        );
    }
    let promises = text.split_once("What ft promises").unwrap().1;
    let promises = promises.split_once("There is no telemetry").unwrap().0;
    assert_eq!(promises.matches("   Test").count(), 8);
}

#[test]
fn every_fault_has_a_test_and_the_table_is_up_to_date() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut now = HEAD.to_string();
    let (mut rows, mut missing) = (0, Vec::new());
    for (title, table) in TABLES {
        write!(
            now,
            "\n## {title}\n\n| | what is done | what happens | tests |\n|---|---|---|---|\n"
        )
        .unwrap();
        for (name, done, happens, tests) in table {
            rows += 1;
            let mut shown = Vec::new();
            if !tests.contains("::") {
                shown.push(tests.to_string());
            }
            for test in tests.split(' ').filter(|t| t.contains("::")) {
                let (file, function) = test.split_once("::").unwrap();
                let by_hand = match found(file, function) {
                    Some((_, comment)) if !names_row(&comment, name) => {
                        missing.push(format!("{name}: the comment of {test} does not say `Row {name}`"));
                        ""
                    }
                    Some((true, _)) => " (by hand)",
                    Some((false, _)) => "",
                    None => {
                        missing.push(format!("{name}: {test}"));
                        ""
                    }
                };
                shown.push(format!("[`{function}`](../{file}){by_hand}"));
            }
            writeln!(now, "| {name} | {done} | {happens} | {} |", shown.join(", ")).unwrap();
        }
    }
    assert_eq!(rows, 70);
    assert!(
        missing.is_empty(),
        "tests that do not exist or do not name their row:\n{}",
        missing.join("\n")
    );
    let file = root.join("docs/reliability.md");
    if std::env::var_os("FT_BLESS").is_some() {
        fs::write(&file, &now).unwrap();
    }
    let kept = fs::read_to_string(&file).unwrap_or_default();
    assert!(kept == now, "docs/reliability.md is stale: run `FT_BLESS=1 cargo test`");
}
