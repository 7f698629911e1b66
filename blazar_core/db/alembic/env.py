#    Licensed under the Apache License, Version 2.0 (the "License"); you may
#    not use this file except in compliance with the License. You may obtain
#    a copy of the License at
#
#         http://www.apache.org/licenses/LICENSE-2.0
#
#    Unless required by applicable law or agreed to in writing, software
#    distributed under the License is distributed on an "AS IS" BASIS, WITHOUT
#    WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied. See the
#    License for the specific language governing permissions and limitations
#    under the License.

"""How alembic reaches the database: on the connection it is given."""

from alembic import context

from blazar_core.db import notes

connection = context.config.attributes['connection']
# All tables are known when those of the notes are.
context.configure(connection=connection,
                  target_metadata=notes.Setting.metadata)
with context.begin_transaction():
    context.run_migrations()
