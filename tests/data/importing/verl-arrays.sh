# Arrays of settings, one of which a run alone would tell.
RATE=1e-6
if [ "${FAST:-0}" = 1 ]; then RATE=5e-6; fi
DATA=(
    algorithm.adv_estimator=rloo
    data.train_batch_size=64
)
ACTOR=(
    actor_rollout_ref.model.path=/models/base
    actor_rollout_ref.actor.optim.lr=${RATE}
    actor_rollout_ref.actor.ppo_mini_batch_size=64
    actor_rollout_ref.actor.use_dynamic_bsz=True
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=7000
    actor_rollout_ref.rollout.name=sglang
    +actor_rollout_ref.model.override_config.attn_implementation=flash_attention_2
    trainer.total_training_steps=90
)
python3 -m verl.trainer.main_ppo "${DATA[@]}" "${ACTOR[@]}" "$@"
