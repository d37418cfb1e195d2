echo "Repair calc.py." > /tmp/instructions.md
exec codex exec --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox -c model_instructions_file=/tmp/instructions.md \
  -c include_permissions_instructions=false -c include_environment_context=false -c skills.include_instructions=false \
  "$(cat $SPO_PROMPT_FILE)"
