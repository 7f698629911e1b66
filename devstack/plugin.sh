#!/usr/bin/env bash
#
# DevStack plugin: leases in Nova. It installs the project beside Nova, writes
# what doc/source/install/index.rst tells an operator to write, makes the
# database, and runs blazar-listener. ("stack", "unstack" and "clean" are
# DevStack's phases.)

# Save trace setting
_XTRACE_BLAZAR_NOVA=$(set +o | grep xtrace)
set +o xtrace

# What an operator adds to nova.conf; most values below are read from it.
BLAZAR_SAMPLE=$BLAZAR_NOVA_DIR/etc/nova-leases/nova.conf
BLAZAR_APP_FACTORY=blazar_nova.api.app:factory
BLAZAR_API_PIPELINE="cors http_proxy_to_wsgi compute_req_id"
BLAZAR_API_PIPELINE+=" request_log sizelimit authtoken keystonecontext"
BLAZAR_API_PIPELINE+=" blazar_app"
NOVA_APP_FACTORY=nova.api.openstack.compute:APIRouterV21.factory

# _blazar_list_with LIST ITEM
# A comma separated list, with an item at its end unless it is in it.
function _blazar_list_with {
    local list=${1// /}
    local item=$2
    if [[ ,$list, == *,$item,* ]]; then
        echo "$list"
    else
        echo "${list:+$list,}$item"
    fi
}

# _blazar_list_without LIST ITEM
function _blazar_list_without {
    local list=,${1// /},
    list=${list//,$2,/,}
    list=${list#,}
    echo "${list%,}"
}

# _blazar_last_of LIST
# The last item of a comma separated list: in those of the sample, ours.
function _blazar_last_of {
    echo "${1##*,}"
}

# _blazar_sample SECTION OPTION
# A value of the sample nova.conf; of several lines, the last.
function _blazar_sample {
    local values
    values=$(iniget_multiline "$BLAZAR_SAMPLE" "$1" "$2")
    echo "${values##* }"
}

# _blazar_nova_confs
# The configuration files of Nova's services: the API's, the scheduler's and
# the super conductor's, and one of each cell's conductor. nova-compute's is
# copied from the first by DevStack, later.
function _blazar_nova_confs {
    echo "$NOVA_CONF"
    local cell conf
    for cell in $(seq 1 "${NOVA_NUM_CELLS:-1}"); do
        conf=$(conductor_conf "$cell")
        if [[ -e $conf ]]; then
            echo "$conf"
        fi
    done
}

function install_blazar_nova {
    setup_develop "$BLAZAR_NOVA_DIR"
}

# Nova sends its versioned notifications to our topic too, from every service,
# by way of the bus of the API level: cells have virtual hosts of their own.
function configure_blazar_notifications {
    local conf format topics
    for conf in $(_blazar_nova_confs); do
        topics=$(iniget "$conf" notifications versioned_notifications_topics)
        # What is configured stays. Nova's default topic is not kept: where
        # nobody asked for it, nobody reads it, and its queue would grow.
        topics=$(_blazar_list_with "$topics" "$BLAZAR_NOTIFICATION_TOPIC")
        format=$(iniget "$conf" notifications notification_format)
        if [[ $format != both ]]; then
            iniset "$conf" notifications notification_format \
                "$(_blazar_sample notifications notification_format)"
        fi
        iniset "$conf" notifications versioned_notifications_topics "$topics"
        iniset "$conf" oslo_messaging_notifications driver \
            "$(_blazar_sample oslo_messaging_notifications driver)"
        iniset "$conf" oslo_messaging_notifications transport_url \
            "$(get_notification_url)"
    done
}

function configure_blazar_scheduler {
    local filters available weighers ours
    iniset "$NOVA_CONF" scheduler enable_isolated_aggregate_filtering \
        "$(_blazar_sample scheduler enable_isolated_aggregate_filtering)"
    filters=$(iniget "$NOVA_CONF" filter_scheduler enabled_filters)
    ours=$(_blazar_sample filter_scheduler enabled_filters)
    iniset "$NOVA_CONF" filter_scheduler enabled_filters \
        "$(_blazar_list_with "${filters:-$ours}" "$(_blazar_last_of "$ours")")"

    # A multi-string option: one line for each value.
    available=$(iniget_multiline "$NOVA_CONF" filter_scheduler \
        available_filters)
    available=${available:-nova.scheduler.filters.all_filters}
    ours=$(_blazar_sample filter_scheduler available_filters)
    if [[ " $available " != *" $ours "* ]]; then
        available+=" $ours"
    fi
    # shellcheck disable=SC2086 # one argument for each value
    iniset_multiline "$NOVA_CONF" filter_scheduler available_filters $available

    weighers=$(iniget "$NOVA_CONF" filter_scheduler weight_classes)
    ours=$(_blazar_sample filter_scheduler weight_classes)
    iniset "$NOVA_CONF" filter_scheduler weight_classes \
        "$(_blazar_list_with "${weighers:-$ours}" \
            "$(_blazar_last_of "$ours")")"
}

function configure_blazar_api {
    iniset "$NOVA_API_PASTE_INI" app:osapi_compute_app_v21 paste.app_factory \
        "$BLAZAR_APP_FACTORY"

    # sed reads the keys.
    iniset "$NOVA_API_PASTE_INI" composite:osapi_compute '\/reservation' \
        blazar_versions
    iniset "$NOVA_API_PASTE_INI" composite:osapi_compute '\/reservation\/v1' \
        blazar_v1
    iniset "$NOVA_API_PASTE_INI" composite:blazar_v1 use \
        call:nova.api.auth:pipeline_factory_v21
    iniset "$NOVA_API_PASTE_INI" composite:blazar_v1 keystone \
        "$BLAZAR_API_PIPELINE"
    iniset "$NOVA_API_PASTE_INI" pipeline:blazar_versions pipeline \
        "cors http_proxy_to_wsgi blazar_versions_app"
    iniset "$NOVA_API_PASTE_INI" app:blazar_versions_app paste.app_factory \
        blazar_nova.api.rest:versions
    iniset "$NOVA_API_PASTE_INI" app:blazar_app paste.app_factory \
        blazar_nova.api.rest:factory
}
# Make the service and its endpoint, by which clients find the lease API.
function create_blazar_accounts {
    local url="$NOVA_SERVICE_PROTOCOL://$NOVA_SERVICE_HOST:$NOVA_SERVICE_PORT"
    get_or_create_service blazar reservation 'Leases of servers'
    get_or_create_endpoint reservation "$REGION_NAME" "$url/reservation/v1"
}

function configure_blazar_leases {
    local keys=$BLAZAR_ENCRYPTION_KEYS
    if [[ -z $keys ]]; then
        keys=$("$BLAZAR_BIN_DIR/blazar-nova-manage" key create)
    fi
    iniset "$NOVA_CONF" blazar encryption_keys "$keys"
    iniset "$NOVA_CONF" blazar notification_topic "$BLAZAR_NOTIFICATION_TOPIC"
    iniset "$NOVA_CONF" blazar_database connection \
        "$(database_connection_url "$BLAZAR_DATABASE")"
}

function configure_blazar_nova {
    configure_blazar_notifications
    if is_service_enabled n-sch; then
        configure_blazar_scheduler
    fi
    if is_service_enabled n-api; then
        configure_blazar_api
    fi
    configure_blazar_leases
}

function init_blazar_nova {
    # As Nova's: once, on the node that has the API.
    # shellcheck disable=SC2086 # a list of services
    if is_service_enabled $DATABASE_BACKENDS && is_service_enabled n-api; then
        recreate_database "$BLAZAR_DATABASE"
        "$BLAZAR_BIN_DIR/blazar-nova-manage" --config-file "$NOVA_CONF" db sync
    fi
}

function start_blazar_nova {
    run_process blazar-listener \
        "$BLAZAR_BIN_DIR/blazar-listener --config-file $NOVA_CONF"
}

function stop_blazar_nova {
    stop_process blazar-listener
}

# Nova's part of a list that configure_blazar_nova has added an item to.
function _blazar_iniremove {
    local conf=$1 section=$2 option=$3 item=$4
    local list
    list=$(_blazar_list_without "$(iniget "$conf" "$section" "$option")" \
        "$item")
    if [[ -n $list ]]; then
        iniset "$conf" "$section" "$option" "$list"
    else
        inidelete "$conf" "$section" "$option"
    fi
}

# Take out of Nova's files what refers to us, so that Nova starts without us.
# The database stays: clean.sh drops them all.
function cleanup_blazar_nova {
    local conf available
    for conf in $(_blazar_nova_confs); do
        [[ -e $conf ]] || continue
        _blazar_iniremove "$conf" notifications \
            versioned_notifications_topics "$BLAZAR_NOTIFICATION_TOPIC"
    done

    if [[ -e $NOVA_CONF ]]; then
        local option
        for option in enabled_filters weight_classes; do
            _blazar_iniremove "$NOVA_CONF" filter_scheduler $option \
                "$(_blazar_last_of \
                    "$(_blazar_sample filter_scheduler $option)")"
        done
        available=$(iniget_multiline "$NOVA_CONF" filter_scheduler \
            available_filters)
        # shellcheck disable=SC2086 # one argument for each value
        iniset_multiline "$NOVA_CONF" filter_scheduler available_filters \
            ${available//$(_blazar_sample filter_scheduler available_filters)/}

        inidelete "$NOVA_CONF" blazar encryption_keys
        inidelete "$NOVA_CONF" blazar notification_topic
        inidelete "$NOVA_CONF" blazar_database connection
    fi

    if [[ -e $NOVA_API_PASTE_INI ]]; then
        iniset "$NOVA_API_PASTE_INI" app:osapi_compute_app_v21 \
            paste.app_factory "$NOVA_APP_FACTORY"
        inidelete "$NOVA_API_PASTE_INI" composite:osapi_compute '\/reservation'
        inidelete "$NOVA_API_PASTE_INI" composite:osapi_compute \
            '\/reservation\/v1'
    fi
}


BLAZAR_BIN_DIR=$(get_python_exec_prefix)

if is_service_enabled nova; then
    if [[ $1 == stack && $2 == install ]]; then
        echo_summary "Installing nova-leases"
        install_blazar_nova

    elif [[ $1 == stack && $2 == post-config ]]; then
        # After Nova's configuration is written, before its services start.
        echo_summary "Configuring nova-leases"
        configure_blazar_nova
        init_blazar_nova

    elif [[ $1 == stack && $2 == extra ]]; then
        # After Nova's services are up: the listener asks them.
        echo_summary "Starting blazar-listener"
        if is_service_enabled n-api; then
            create_blazar_accounts
        fi
        start_blazar_nova
    fi

    if [[ $1 == unstack ]]; then
        stop_blazar_nova
    fi

    if [[ $1 == clean ]]; then
        cleanup_blazar_nova
    fi
fi

# Restore xtrace
$_XTRACE_BLAZAR_NOVA
